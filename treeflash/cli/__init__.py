"""The command line; each command in a file of its own."""

import importlib
import io
import sys

import click
from click.shell_completion import CompletionItem

from treeflash import __version__
from treeflash.cli.suggestions import Group
from treeflash.errors import TreeflashError

# A command's file, by the command, and what it does.
_COMMANDS = {
    "bench": ("bench", "Measure recipes side by side."),
    "cache": ("cache", "List or clear what is kept to be used again."),
    "check": ("check", "Load what a recipe names and see that it fits."),
    "completion": ("completion", "Print a completion script for a shell."),
    "components": ("components", "List what is installed, with options."),
    "eval": ("evaluate", "Compare drafts with the target along its own texts."),
    "generate": ("generate", "Answer a prompt."),
    "recipes": ("recipes", "List, show and check recipes."),
    "regenerate": ("regenerate", "Write training data: the target's answers to prompts."),
    "study": ("study", "Train what is missing, measure everything, write one report."),
    "train": ("train", "Train a drafter on the target's answers."),
}


class _Commands(Group):
    """Commands that are imported when they are called: what they need takes seconds, and help does not."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports a command."""
        if cmd_name not in _COMMANDS:
            return None
        file, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"treeflash.cli.{file}"), file)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists them without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes their names without importing any."""
        names = [
            CompletionItem(name, help=text)
            for name, (_, text) in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="treeflash")
def commands() -> None:
    """Lossless tree speculative decoding from interchangeable parts."""


def main() -> None:
    """Runs a command; a user's mistake is one message and exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What the console has no character for is shown by its number; the error stream does so already.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        commands()
    except TreeflashError as error:
        click.echo(f"treeflash: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        # Files are read and written where their errors are known. What is left is the output itself: a full
        # disk, for instance. (Click ends silently when a pipe is closed.)
        sys.stdout = io.StringIO()  # at the end Python would try to write the rest once more
        place = "the output cannot be written" if error.filename is None else error.filename
        click.echo(f"treeflash: {place}: {error.strerror or error}", err=True)
        sys.exit(2)
