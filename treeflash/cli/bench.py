"""`treeflash bench`: recipes side by side."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from treeflash.cli.options import (
    dtype_option,
    laid_over,
    overrides_option,
    progress_bar,
    resumable,
)
from treeflash.cli.waiting import waiting
from treeflash.errors import InputError
from treeflash.evaluation.arms import ArmText, check_arms, open_arms
from treeflash.evaluation.prompt_sets import open_set, same_names
from treeflash.extras import require_packages
from treeflash.plugins import Registry
from treeflash.ranges import MAX_SEED

if TYPE_CHECKING:
    from treeflash.evaluation.profile import Profile


# Of the text along which work is counted: steps are much alike.
_COUNTED_TOKENS = 24


@click.command()
@click.argument("arms", nargs=-1, required=True, metavar="ARM...")
@click.option(
    "--prompts",
    "places",
    multiple=True,
    required=True,
    metavar="[NAME=]FILE|NAME",
    help="Prompt set: gsm8k, math500, humaneval, mbpp or mt-bench, from the hub or =FILE; or a file of JSON "
    "lines. May be repeated.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for results.")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts of each set; all when not given.")
@click.option(
    "--draw",
    type=click.IntRange(min=0, max=MAX_SEED),
    metavar="SEED",
    help="Draw prompts by a seed; else the first.",
)
@click.option(
    "--as-it-is", is_flag=True, help="Take known sets without the papers' wording and choice of rows."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0, max=MAX_SEED), default=0, show_default=True)
@click.option("--time-stages", is_flag=True, help="On a GPU: wait behind each stage to time it.")
@click.option(
    "--profile",
    "profiled",
    is_flag=True,
    help="Count what each stage computes and moves too, and say how near a step is to the target's own pass.",
)
@dtype_option
@overrides_option
def bench(
    arms: tuple[str, ...],
    places: tuple[str, ...],
    out: Path,
    limit: int | None,
    draw: int | None,
    as_it_is: bool,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    time_stages: bool,
    profiled: bool,
    dtype: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Measure recipes against plain decoding: one target, the same prompts, one clock.

    An ARM is a recipe, or NAME=RECIPE,table.key=value,... with overrides of its own. Arms take turns prompt
    by prompt. A measurement that was stopped goes on where it was; OUT/report.html shows it.
    """
    require_packages("a report", "matplotlib")
    registry, laid = Registry.load(), laid_over(overrides, dtype)
    asked = [ArmText.parse(arm) for arm in arms]
    check_arms(asked, registry, laid)
    fault = same_names(places)
    if fault is not None:
        raise InputError(f"--prompts: {fault}")
    sets = [open_set(place, limit=limit, draw=draw, reworded=not as_it_is) for place in places]
    # What takes seconds to import comes after all that can be refused without it.
    from treeflash.evaluation.bench import MANIFEST, Bench, BenchSettings
    from treeflash.evaluation.profile import profiles, work_of, write_profiles
    from treeflash.evaluation.report import Provenance, write_report
    from treeflash.evaluation.summary import summarise
    from treeflash.training.folders import read_manifest

    with waiting("loading the target") as progress:
        target, opened = open_arms(asked, registry, laid, progress=progress)
    # On a CPU stages are timed always.
    timed = time_stages or (profiled and target.device.type != "cpu")
    settings = BenchSettings(max_new_tokens, temperature, seed, timed)
    with resumable(), progress_bar() as bar:
        task = bar.add_task("answers", total=None, figures="")
        measured = Bench(
            target,
            opened,
            sets,
            settings,
            out,
            lambda done, total: bar.update(task, completed=done, total=total),
        ).run()
    summaries = summarise(measured)
    for name, rows in summaries.items():
        count = rows[0].prompts
        title = f"{name}, {count} prompt{'s' * (count > 1)}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        # On a narrow screen the name gives way: figures that are cut off are worth nothing.
        table.add_column("arm", overflow="fold", min_width=8)
        for head in ("tau", "tokens/s", "speedup", "(95 %)", "same", "tie", "wrong"):
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(
                row.label,
                f"{row.block_efficiency:.2f}",
                f"{row.tokens_per_second:.1f}",
                f"{row.speedup:.2f}",
                row.speedup_interval,
                *row.audit_counts,
            )
        Console().print(table)
        for row in rows:
            if row.disturbance is not None:
                click.echo(f"warning: {name}, {row.disturbance}")
    if profiled:
        found = {}
        for prompts in sets:
            rows = summaries[prompts.name]
            prompt = target.require_text().encode_chat(prompts.prompts[0].turns[0])
            found[prompts.name] = profiles(rows, work_of(opened, rows, prompt, _COUNTED_TOKENS))
            if untimed := [row.arm for row in rows if row.pass_seconds is None]:
                click.echo(
                    f"{prompts.name}: no profile of {', '.join(untimed)}: no answer took a step, or passes "
                    "were not timed in some; measure those into another folder"
                )
        for name, arms_found in found.items():
            for profile in arms_found:
                step, share = 1000 * profile.seconds, 100 * profile.efficiency
                click.echo(
                    f"{name}, {profile.arm}: a step of {step:.1f} ms, the target's own pass "
                    f"{1000 * profile.pass_seconds:.1f} ms: {share:.0f} % as fast as if all else were free"
                )
                Console().print(_stages(profile))
        write_profiles(out, found)
    provenance = Provenance(
        target=next(arm.recipe.target.model for arm in opened if arm.recipe is not None),
        prompts={prompts.name: prompts.source for prompts in sets},
        command=shlex.join(["treeflash", *sys.argv[1:]]),
    )
    manifest = read_manifest(out, MANIFEST, "a folder of treeflash bench")
    page = write_report(out, summaries, manifest, provenance)
    click.echo(f"report: {page}")


def _stages(profile: "Profile") -> Table:
    """A profile as a table."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("stage")
    for head in ("ms", "share", "GFLOP", "MB", "calls", "GFLOP/s", "GB/s"):
        table.add_column(head, justify="right", no_wrap=True)
    for stage in profile.stages:
        work, seconds = stage.work, max(stage.seconds, 1e-9)
        table.add_row(
            stage.name,
            f"{1000 * stage.seconds:.2f}",
            f"{100 * stage.seconds / profile.seconds:.0f} %",
            f"{work.flops / 1e9:.3f}",
            f"{work.bytes / 1e6:.1f}",
            str(work.calls),
            f"{work.flops / seconds / 1e9:.0f}",
            f"{work.bytes / seconds / 1e9:.1f}",
        )
    return table
