"""`treeflash regenerate`: training data, in the target's own words."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from treeflash.cli.options import (
    dtype_option,
    laid_over,
    overrides_option,
    progress_bar,
    recipe_argument,
    resumable,
)
from treeflash.errors import InputError
from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.ranges import MAX_SEED
from treeflash.recipe import Recipe

if TYPE_CHECKING:
    from treeflash.training.regeneration import Progress


@click.command()
@recipe_argument
@click.option(
    "--prompts",
    required=True,
    type=click.Path(path_type=Path),
    help="File of JSON lines or one array, or .txt with a prompt a line.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Data directory to make.")
@click.option("--limit", type=click.IntRange(min=1), help="Read this many rows of the file.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=512, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0, max=MAX_SEED), default=0, show_default=True)
@click.option(
    "--heldout", type=click.FloatRange(0, 1), default=0.02, show_default=True, help="Share held out."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True)
@dtype_option
@overrides_option
def regenerate(
    recipe: str,
    prompts: Path,
    out: Path,
    limit: int | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    heldout: float,
    batch_size: int,
    dtype: str | None,
    overrides: tuple[str, ...],
) -> None:
    """Write the answers of RECIPE's target to every prompt of a file into a data directory.

    A line of the file is an object with `turns`, `prompt`, `question`, `problem` or `text`. A run that was
    stopped goes on where it was when started again with the same settings.
    """
    read = read_prompts(prompts, limit)
    registry = Registry.load()
    laid = laid_over(overrides, dtype)
    Recipe.check_outline(recipe, registry, laid)
    # What takes seconds to import comes after all that can be refused without it.
    from treeflash.target import HuggingFaceTarget
    from treeflash.training.regeneration import RegenerationSettings
    from treeflash.training.regeneration import regenerate as answer
    from treeflash.training.token_file import TokenFile

    checked = Recipe.load(recipe, registry, laid)
    target = checked.load_target(registry)
    if not isinstance(target, HuggingFaceTarget):
        raise InputError(f"expected a Hugging Face model to regenerate with, found {type(target).__name__}")
    settings = RegenerationSettings(max_new_tokens, temperature, seed, heldout, batch_size)
    with resumable(), progress_bar() as bar:
        task = bar.add_task("answers", total=None, figures="")

        def show(progress: "Progress") -> None:
            elapsed = bar.tasks[task].elapsed or 1.0
            speed = f"{progress.tokens / elapsed:.0f} tokens/s"
            bar.update(task, completed=progress.rows, total=progress.total_rows, figures=speed)

        store = answer(target, checked.target.model, read, out, settings, show)
    written = TokenFile.open(store)
    held, tokens = len(written.rows("heldout")), int(written.answer_lengths.sum())
    click.echo(f"{out}: {len(written)} answers, {held} of them held out, {tokens} tokens")
