"""`treeflash components`: what is installed, where from, and what it takes."""

import importlib.metadata
from typing import Any

import click

from treeflash.cli.suggestions import Choice
from treeflash.describing import OptionRow, option_rows, summary
from treeflash.plugins import Registry, claimed

_HEADINGS = {
    "drafter": "Drafters",
    "builder": "Tree builders",
    "refiner": "Refiners",
    "selector": "Selectors",
    "verifier": "Verifiers",
    "trainable": "Ways to train a drafter",
    "loss": "Losses",
}


@click.command()
@click.argument("kind", required=False, type=Choice([*_HEADINGS, "target"]))
def components(kind: str | None) -> None:
    """List the components that recipes can use: by KIND, or all.

    Each with the package it comes from, and with its options, their types and defaults; with KIND, also with
    what they mean.
    """
    registry = Registry.load()
    found_by_kind = dict(registry.components)  # all, so that every failure is known
    for name, heading in _HEADINGS.items():
        if kind in (None, name):
            click.echo(click.style(heading, bold=True))
            for key, found in sorted(found_by_kind[name].items()):
                _show(key, found.value, found.origin, name, with_text=kind is not None)
            click.echo()
    if kind == "target" or (kind is None and registry.targets):
        click.echo(click.style("Targets", bold=True))
        if not registry.targets:
            click.echo("  none by name; target.model takes folders and hub names too")
        for key, found in sorted(registry.targets.items()):
            click.echo(f"  {key}  [{_version(found.origin)}]")
    for plugin, faults in registry.failures.items():
        for fault in faults:
            click.echo(f"treeflash: plugin {plugin} failed: {fault}", err=True)
    for (kind_of, name), origins in registry.claims.items():
        click.echo(f"treeflash: {claimed(kind_of, name, origins)}", err=True)


def _show(name: str, value: Any, origin: str, kind: str, *, with_text: bool) -> None:
    lossy = "" if getattr(value, "lossless", True) else "  (lossy)"
    click.echo(f"  {click.style(name, bold=True)}  [{_version(origin)}]{lossy}  {summary(value)}")
    options = value.Options if kind == "trainable" else value.options_class()
    for row in option_rows(options):
        click.echo(_line(row, "", with_text))
    for row in option_rows(value.TrainingOptions) if hasattr(value, "TrainingOptions") else ():
        click.echo(_line(row, ", in training", with_text))


def _line(row: OptionRow, where: str, with_text: bool) -> str:
    default = f" = {row.default}" if row.default not in ("", "required") else ""
    needed = ", required" if row.default == "required" else ""
    text = f"  {click.style(row.text, dim=True)}" if with_text and row.text else ""
    return f"      {row.name}: {row.kind}{default}{needed}{where}{text}"


def _version(origin: str) -> str:
    try:
        return f"{origin} {importlib.metadata.version(origin)}"
    except importlib.metadata.PackageNotFoundError:
        return origin
