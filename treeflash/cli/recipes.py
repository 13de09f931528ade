"""`treeflash recipes`: which there are, what one says and from where, and whether they are right."""

import itertools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from treeflash.cli.options import complete_recipe, overrides_option, recipe_argument
from treeflash.cli.suggestions import Group
from treeflash.describing import as_toml, option_rows
from treeflash.errors import TreeflashError
from treeflash.places import on_disk
from treeflash.plugins import KINDS, Registered, Registry
from treeflash.recipe import DEFAULTS, Recipe, TargetOptions
from treeflash.recipe_tables import (
    Layer,
    find,
    merge,
    merged,
    open_tables,
    origins,
    parse_overrides,
    read_layers,
)

# The folder of recipes that are there to be compared with others.
_ABLATIONS = "ablations"


@click.group(cls=Group)
def recipes() -> None:
    """List recipes, show what one says, check that they are right."""


@recipes.command(name="list")
def list_recipes() -> None:
    """List the recipes that are found by name, ablations last.

    Those marked "trains" are for treeflash train. Those marked "downloads" name a model or checkpoint that is
    not on this disk or that a plugin fetches; it is kept after the first use.
    """
    registry = Registry.load()
    width = max(map(len, registry.recipes), default=0)

    def place(item: tuple[str, Registered]) -> tuple[bool, str]:
        return item[1].value.parent.name == _ABLATIONS, item[0]

    for name, found in sorted(registry.recipes.items(), key=place):
        marks = ", ".join(_marks(found.value, registry))
        shown = click.style(name.ljust(width), bold=True)
        click.echo(f"{shown}  [{found.origin}]  {f'({marks}) ' if marks else ''}{_comment(found.value)}")


@recipes.command()
@recipe_argument
@overrides_option
def show(recipe: str, overrides: tuple[str, ...]) -> None:
    """Show what RECIPE comes to, and the file that says each thing.

    A value that no file says is the component's default.
    """
    registry = Registry.load()
    layers = read_layers(find(recipe, registry), registry)
    lines = [(f"# {layer.path}", "") for layer in layers]
    if overrides:
        layers.append(Layer(Path("-o"), parse_overrides(overrides)))
    tables = merged(layers)
    alike = len({layer.path.name for layer in layers}) < len(layers)
    said = {place: str(path) if alike else path.name for place, path in origins(layers).items()}
    training = "train" in tables
    for table, values in (tables if training else _with_defaults(tables)).items():
        if not isinstance(values, Mapping):
            continue
        lines.append((f"\n[{table}]", ""))
        for key, value in values.items():
            lines.append((f"{key} = {as_toml(value)}", said.get((table, key), "default")))
        for name, default in _defaults(registry, table, values, training):
            lines.append((f"{name} = {default}", "default"))
    width = max((len(text) for text, origin in lines if origin), default=0)
    for text, origin in lines:
        click.echo(f"{text.ljust(width)}  # {origin}" if origin else text)


@recipes.command()
@click.argument("names", nargs=-1, metavar="[RECIPE]...", shell_complete=complete_recipe)
@overrides_option
def check(names: tuple[str, ...], overrides: tuple[str, ...]) -> None:
    """Check recipes, or all that are found by name, without touching a model."""
    from treeflash.training.training_recipe import TrainingRecipe

    registry, over = Registry.load(), parse_overrides(overrides)
    wrong = 0
    for name in names or sorted(registry.recipes):
        try:
            trains = "train" in open_tables(name, registry, over).tables
            kind = TrainingRecipe if trains else Recipe
            kind.load(name, registry, over)
            click.echo(f"{name}: right")
        except TreeflashError as error:
            wrong += 1
            click.echo(f"{name}: wrong\n{error}")
    if wrong:
        sys.exit(2)


def _with_defaults(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tables in the order of a step, with the parts that a recipe need not name."""
    whole = merge(DEFAULTS, tables)
    order = [table for table in ("target", *KINDS) if table in whole]
    return {table: whole[table] for table in (*order, *(rest for rest in whole if rest not in order))}


def _defaults(
    registry: Registry, table: str, values: Mapping[str, Any], training: bool
) -> list[tuple[str, str]]:
    """Keys that the table leaves out and that have a default."""
    return [
        (row.name, row.default)
        for options in _options(registry, table, str(values.get("use")), training)
        for row in option_rows(options)
        if row.name not in values and row.default not in ("", "required")
    ]


def _options(registry: Registry, table: str, use: str, training: bool) -> list[type[Any]]:
    """The classes that say what a table may hold."""
    from treeflash.training.settings import DataSettings, LossSettings, OptimizerSettings, TrainSettings

    settings: dict[str, list[type[Any]]] = {"target": [TargetOptions], "train": [TrainSettings]}
    settings |= {"data": [DataSettings], "optimizer": [OptimizerSettings], "loss": [LossSettings]}
    kind = "trainable" if training and table == "drafter" else table
    if kind not in registry.components:
        return settings.get(table, [])
    try:
        component = registry.component(kind, use)
    except TreeflashError:  # what is wrong with it, `recipes check` says
        return settings.get(table, [])
    if kind == "trainable":
        return [component.Options]
    if training and table == "refiner":
        return [component.TrainingOptions] if hasattr(component, "TrainingOptions") else []
    return [component.options_class(), *settings.get(table, [])]


def _marks(path: Path, registry: Registry) -> list[str]:
    """What to know of a recipe before it is used; nothing of one that cannot be read."""
    try:
        tables = merged(read_layers(path, registry))
    except TreeflashError:
        return []
    values = [values for values in tables.values() if isinstance(values, Mapping)]
    places = {(key, str(table[key])) for table in values for key in ("model", "checkpoint") if key in table}
    marks = {"trains": "train" in tables, "downloads": any(_fetched(*place, registry) for place in places)}
    return [mark for mark, applies in marks.items() if applies]


def _fetched(key: str, place: str, registry: Registry) -> bool:
    """Whether a model or checkpoint comes over the network the first time."""
    try:
        return (key == "model" and place in registry.targets) or on_disk(place, key) is None
    except TreeflashError:
        return False  # inside a package that is not installed


def _comment(path: Path) -> str:
    """The first sentence of what the file says of itself."""
    lines = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text(encoding="utf-8", errors="replace").splitlines()
    )
    text = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split(r"(?<=\.)\s", text)[0]
