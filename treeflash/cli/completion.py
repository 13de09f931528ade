"""`treeflash completion`: what a shell needs to complete commands, options and recipe names."""

import click
from click.shell_completion import get_completion_class

from treeflash.cli.suggestions import Choice


@click.command()
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    For bash: `eval "$(treeflash completion bash)"`, in ~/.bashrc to keep it.
    """
    from treeflash.cli import commands  # which has this command

    found = get_completion_class(shell)
    assert found is not None, "click knows the shells of the choice"
    click.echo(found(commands, {}, "treeflash", "_TREEFLASH_COMPLETE").source())
