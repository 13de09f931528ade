"""What the error stream shows while something takes seconds before the first result."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, Task, TextColumn
from rich.text import Text


class _Count(MofNCompleteColumn):
    """How much of a task is done, once it is known how much there is."""

    def render(self, task: Task) -> Text:
        """Shows nothing of a task without an end."""
        return Text("") if task.total is None else super().render(task)


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str, int, int], None]]:
    """Shows that something is under way: on a terminal in a line that moves, elsewhere a line for each task.

    Args:
        text: What it is, until more is told.

    Yields:
        Tells more: the name of a task, how much of it is done and how much there is.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        told = set()

        def say(task: str, done: int, total: int) -> None:
            if task not in told:
                told.add(task)
                click.echo(f"treeflash: {task}", err=True)

        yield say
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _Count())
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task(text, total=None)
        yield lambda task, done, total: bar.update(line, description=task, completed=done, total=total)
