"""`treeflash train`: a drafter, from the target's answers."""

import os
from pathlib import Path
from typing import Any

import click

from treeflash.cli.options import overrides_option, progress_bar, recipe_argument, resumable
from treeflash.extras import require_packages
from treeflash.plugins import Registry
from treeflash.recipe_tables import parse_overrides
from treeflash.training.answers import AnswerStore
from treeflash.training.training_recipe import TrainingRecipe


@click.command()
@recipe_argument
@click.option(
    "--data",
    "folders",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Data directory of `treeflash regenerate`; may be given several times.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run.")
@overrides_option
def train(recipe: str, folders: tuple[Path, ...], out: Path, overrides: tuple[str, ...]) -> None:
    """Train the drafter of RECIPE, a training recipe, into a folder.

    A run that was stopped goes on from its last checkpoint when started again with the same settings, and
    ends with the same weights. The drafter is written to OUT/drafter, with a recipe that decodes with it.
    """
    require_packages("training", "accelerate", "matplotlib")
    registry, over = Registry.load(), parse_overrides(overrides)
    TrainingRecipe.check_outline(recipe, registry, over)
    for folder in folders:
        AnswerStore(folder).manifest()  # refuses a folder that holds no answers
    # What takes seconds to import comes after all that can be refused without it.
    from treeflash.training import session
    from treeflash.training.trainer import Progress

    checked = TrainingRecipe.load(recipe, registry, over)
    speaks = os.environ.get("RANK", "0") == "0"  # of several processes, one
    with resumable(), progress_bar(quiet=not speaks) as bar:
        task = bar.add_task("preparing", total=None, figures="")

        def on_states(done: int, total: int) -> None:
            speed = done / (bar.tasks[task].elapsed or 1.0)
            bar.update(
                task, description="states", completed=done, total=total, figures=f"{speed:.0f} tokens/s"
            )

        def on_progress(progress: Progress) -> None:
            if bar.tasks[task].description != "training":
                bar.reset(task, completed=progress.step - 1)
            figures = (
                f"loss {progress.loss:.3f}, {progress.block_efficiency:.2f} tokens a step held out, "
                f"{progress.positions_per_second:.0f} positions/s"
            )
            bar.update(
                task, description="training", completed=progress.step, total=progress.steps, figures=figures
            )

        def on_measured(step: int, measured: dict[str, Any]) -> None:
            parts = []
            for name, part in measured.items():
                hits = " ".join(f"{hit:.2f}" for hit in part["top1"])
                parts.append(f"{name} {part['block_efficiency']:.2f} (top-1 {hits})")
            say(f"step {step}, tokens a step held out: {', '.join(parts)}")

        def say(sentence: str) -> None:
            bar.console.print(sentence, soft_wrap=True)

        listener = session.Listener(say, on_states, on_progress, on_measured)
        written = session.train(checked, registry, folders, out, listener)
    if speaks:
        click.echo(f"decode with it: treeflash generate {written} ...")
