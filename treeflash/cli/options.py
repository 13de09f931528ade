"""Options that several commands share."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from treeflash.cli.suggestions import Choice
from treeflash.ranges import AUTO, DTYPE_NAMES, FASTEST
from treeflash.recipe_tables import merge, parse_overrides


def complete_recipe(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of recipes that begin with what is typed so far; files when none does."""
    from treeflash.plugins import Registry  # while completing alone

    return _completed(Registry.load().recipes, incomplete)


def complete_study(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Names of studies that begin with what is typed so far; files when none does."""
    from treeflash.plugins import Registry  # while completing alone

    return _completed(Registry.load().studies, incomplete)


def _completed(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    fitting = sorted(name for name in names if name.startswith(incomplete))
    return [CompletionItem(name) for name in fitting] or [CompletionItem(incomplete, type="file")]


# What trees are drawn with.
_LINES = "│├└─"

recipe_argument = click.argument("recipe", shell_complete=complete_recipe)
overrides_option = click.option(
    "-o",
    "overrides",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Override the recipe: selector.budget=31.",
)
dtype_option = click.option(
    "--dtype",
    type=Choice((AUTO, FASTEST, *DTYPE_NAMES)),
    help="What to compute in, in place of the recipe's.",
)


def laid_over(overrides: Sequence[str], dtype: str | None) -> dict[str, Any]:
    """The tables that the options lay over a recipe.

    Args:
        overrides: Of `-o`.
        dtype: Of `--dtype`; where `-o` says another, that counts.

    Returns:
        The tables.
    """
    shorthand = {} if dtype is None else {"target": {"dtype": dtype}}
    return merge(shorthand, parse_overrides(overrides))


def drawable(picture: str, *, err: bool = False) -> str:
    """A picture in characters that the console has.

    Args:
        picture: Drawn with lines and corners.
        err: Whether it goes to the error stream.

    Returns:
        The same, in ASCII if the stream's encoding lacks lines and corners.
    """
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    try:
        _LINES.encode(encoding)
    except UnicodeEncodeError:
        return picture.translate(str.maketrans(_LINES, "|+`-"))
    return picture


def progress_bar(*, quiet: bool = False) -> Progress:
    """A bar on the error stream, if that is a terminal: counts, the time left, a field `figures`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        # Last, where a narrow screen cuts it off.
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True)),
    )
    console = Console(stderr=True, quiet=quiet)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def name_width(names: Iterable[str]) -> int:
    """The width of a column of names: room for those of recipes, not for all that is laid over them."""
    return min(24, max((len(name) for name in names), default=0))


@contextmanager
def resumable() -> Iterator[None]:
    """For what goes on where it was: says so to whoever stops it."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("treeflash: stopped; the same command goes on from here", err=True)
        sys.exit(130)
