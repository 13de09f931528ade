"""The command line; each command in a file of its own."""

import sys

import click

from treeflash import __version__
from treeflash.cli.bench import bench
from treeflash.cli.check import check
from treeflash.cli.completion import completion
from treeflash.cli.components import components
from treeflash.cli.evaluate import evaluate
from treeflash.cli.generate import generate
from treeflash.cli.recipes import recipes
from treeflash.cli.regenerate import regenerate
from treeflash.cli.study import study
from treeflash.cli.train import train
from treeflash.errors import TreeflashError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="treeflash")
def commands() -> None:
    """Lossless tree speculative decoding from interchangeable parts."""


for command in (bench, check, completion, components, evaluate, generate, recipes, regenerate, study, train):
    commands.add_command(command)


def main() -> None:
    """Runs a command; a user's mistake is one message and exit status 2."""
    try:
        commands()
    except TreeflashError as error:
        click.echo(f"treeflash: {error}", err=True)
        sys.exit(2)
