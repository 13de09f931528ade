"""`treeflash train`: a drafter, from the target's answers."""

import os
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from treeflash.errors import TrainingError
from treeflash.plugins import Registry
from treeflash.recipe import parse_overrides


@click.command(short_help="Train a drafter on the target's answers.")
@click.argument("recipe")
@click.option(
    "--data",
    "folders",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Data directory of `treeflash regenerate`; may be given several times.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the run.")
@click.option(
    "-o",
    "overrides",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Override the recipe: train.steps=2000.",
)
def train(recipe: str, folders: tuple[Path, ...], out: Path, overrides: tuple[str, ...]) -> None:
    """Train the drafter of RECIPE, a training recipe, into a folder.

    A run that was stopped goes on from its last checkpoint when started again with the same settings, and
    ends with the same weights. The drafter is written to OUT/drafter, with a recipe that decodes with it.
    """
    try:
        from treeflash.training import session
        from treeflash.training.trainer import Progress
        from treeflash.training.training_recipe import TrainingRecipe
    except ImportError as error:
        raise TrainingError(
            f"training needs more packages ({error}): pip install 'treeflash[train]'"
        ) from None

    registry = Registry.load()
    checked = TrainingRecipe.load(recipe, registry, parse_overrides(overrides))
    with _bar() as bar:
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
                f"loss {progress.loss:.3f}, {progress.block_efficiency:.2f} tokens a step on held-out text, "
                f"{progress.positions_per_second:.0f} positions/s"
            )
            bar.update(
                task, description="training", completed=progress.step, total=progress.steps, figures=figures
            )

        listener = session.Listener(bar.console.print, on_states, on_progress)
        written = session.train(checked, registry, folders, out, listener)
    if os.environ.get("RANK", "0") == "0":
        click.echo(f"decode with it: treeflash generate {written} ...")


def _bar() -> ProgressBar:
    quiet = os.environ.get("RANK", "0") != "0"  # of several processes, one speaks
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    return ProgressBar(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True, quiet=quiet)
    )
