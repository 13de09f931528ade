"""`treeflash eval`: recipes along texts the target wrote."""

from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from treeflash.cli.options import (
    dtype_option,
    laid_over,
    name_width,
    overrides_option,
    progress_bar,
)
from treeflash.cli.suggestions import Choice
from treeflash.cli.waiting import waiting
from treeflash.errors import InputError
from treeflash.evaluation.arms import ArmText, check_arms, open_arms
from treeflash.extras import require_packages
from treeflash.plugins import Registry
from treeflash.ranges import MAX_SEED, MOST_NODES
from treeflash.training.answers import AnswerStore


def _budgets(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        found = ()
    if not found or any(not 1 <= budget <= MOST_NODES for budget in found):
        raise click.BadParameter(
            f"expected numbers of nodes like 15,63, each from 1 to {MOST_NODES}, found {value!r}"
        )
    return found


@click.command(name="eval")
@click.argument("arms", nargs=-1, required=True, metavar="ARM...")
@click.option(
    "--data", required=True, type=click.Path(path_type=Path), help="Data directory of the target's answers."
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for results.")
@click.option(
    "--split",
    type=Choice(["heldout", "train", "all"]),
    default="heldout",
    show_default=True,
    help="Part of the answers to measure along.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Answers at most; all when not given.")
@click.option(
    "--anchors", type=click.IntRange(min=0), default=8, show_default=True, help="Drafts compared in each."
)
@click.option(
    "--paths",
    type=click.IntRange(min=0),
    default=16,
    show_default=True,
    help="Paths sampled behind each for the true marginal, an even number; 0 leaves it out.",
)
@click.option(
    "--budgets",
    default="4,8,15,31,63,127",
    show_default=True,
    callback=_budgets,
    help="Budgets to simulate, the root not counted.",
)
@click.option(
    "--real", type=click.IntRange(min=0), default=0, show_default=True, help="Answers to decode for real too."
)
@click.option(
    "--seed", type=click.IntRange(min=0, max=MAX_SEED), default=0, show_default=True, help="Of the paths."
)
@dtype_option
@overrides_option
def evaluate(
    arms: tuple[str, ...],
    data: Path,
    out: Path,
    split: str,
    limit: int | None,
    anchors: int,
    paths: int,
    budgets: tuple[int, ...],
    real: int,
    seed: int,
    dtype: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Measure recipes along texts that the target wrote, as `treeflash regenerate` leaves them.

    Says, by depth, how far a draft's distributions are from the target's; what a tree of each budget would be
    worth; and how sure drafts are against how right. An ARM is a recipe, or NAME=RECIPE,table.key=value,...
    """
    require_packages("a report", "matplotlib")
    registry, laid = Registry.load(), laid_over(overrides, dtype)
    asked = [ArmText.parse(arm) for arm in arms]
    check_arms(asked, registry, laid)
    if paths % 2:
        raise InputError(f"--paths: expected an even number, found {paths}")
    AnswerStore(data).manifest()  # refuses a folder that holds no answers
    # What takes seconds to import comes after all that can be refused without it.
    from treeflash.evaluation.eval_report import write_page
    from treeflash.evaluation.evaluate import EvalSettings, write_results
    from treeflash.evaluation.evaluate import evaluate as measure
    from treeflash.training.locks import held

    parts = {"heldout": "heldout", "train": "train", "all": None}
    settings = EvalSettings(parts[split], limit, anchors, paths, budgets, real, seed)  # type: ignore[arg-type]
    with waiting("loading the target") as progress:
        target, opened = open_arms(asked, registry, laid, progress=progress, by_clock=False)
    with held(out), progress_bar() as bar:
        task = bar.add_task("answers", total=limit, figures="")
        results = measure(target, opened, data, settings, lambda done: bar.update(task, completed=done))
        write_results(out, results)
        page = write_page(out, results)
    table = Table(title=f"{results['texts']} answers", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("arm", overflow="fold", min_width=name_width(results["arms"]))
    table.add_column("tau", justify="right")
    for budget in budgets:
        table.add_column(f"at {budget}", justify="right")
    for name, found in results["arms"].items():
        sizes = [f"{found['by_budget'].get(str(size), 0):.2f}" for size in budgets]
        shown = sizes if found["by_budget"] else [""] * len(budgets)
        table.add_row(name, f"{found['block_efficiency']:.2f}", *shown)
    Console().print(table)
    click.echo(f"report: {page}")
