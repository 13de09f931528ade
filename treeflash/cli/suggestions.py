"""Commands and choices that name the nearest valid one when they are misspelt."""

from typing import Any

import click

from treeflash.errors import nearest


class Group(click.Group):
    """A group of commands; a misspelt one is told with the nearest."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command that the first word names."""
        word = args[0]
        if self.get_command(ctx, word) is None and not ctx.resilient_parsing and not word.startswith("-"):
            ctx.fail(f"there is no command {word!r}{nearest(word, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class Choice(click.Choice[str]):
    """A choice among words; a misspelt one is told with the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Takes a word."""
        if value not in self.choices:
            *others, last = self.choices
            near = nearest(str(value), self.choices).partition(" (known")[0]
            self.fail(f"expected {', '.join(others)} or {last}, found {value!r}{near}", param, ctx)
        return str(value)
