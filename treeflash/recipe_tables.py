"""From recipe files to tables: finding, reading, laying one over the other."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.errors import (
    InputError,
    PluginError,
    RecipeError,
    UnknownNameError,
    bullet_list,
    first_line,
    nearest,
)
from treeflash.places import anchored, empty_places
from treeflash.plugins import Registry

# What a table uses that does not say.
DEFAULT_USE = {"selector": "opt-tree", "verifier": "sdpa-tree", "loss": "forward-kl"}


def find(name: str | Path, registry: Registry) -> Path:
    """Finds a recipe's file.

    Args:
        name: A recipe's name, or the path of a TOML file. The ending may be left out of a path that no
            recipe has for a name.
        registry: What is installed.

    Returns:
        The file.

    Raises:
        UnknownNameError: When there is none.
        InputError: When it is neither.
    """
    if not isinstance(name, str | Path):
        raise InputError(f"expected a recipe's name or path, found {name!r}")
    if isinstance(name, Path) or name.endswith(".toml"):
        path = Path(name)
        if not os.path.isfile(path):  # False for a name that no file can have, too
            raise UnknownNameError(f"no recipe file {path}")
        return path
    beside = Path(f"{name}.toml")
    return beside if name not in registry.recipes and os.path.isfile(beside) else registry.recipe(name)


@attrs.frozen
class Written:
    """What a recipe says, unchecked.

    Attributes:
        path: The file.
        tables: Its tables, with those of what it extends below them and overrides above.
        overridden: The keys that overrides gave, as `table.key`.
    """

    path: Path
    tables: dict[str, Any]
    overridden: Sequence[str]

    @property
    def name(self) -> str:
        """What messages call it: the file does not say what was laid over it."""
        return f"{self.path} ({', '.join(self.overridden)} overridden)" if self.overridden else str(self.path)


def open_tables(
    name: str | Path, registry: Registry, overrides: Mapping[str, Mapping[str, Any]] | None
) -> Written:
    """Finds a recipe and reads what it says.

    Args:
        name: A recipe's name, or the path of a TOML file.
        registry: What is installed.
        overrides: Tables laid over the file's.

    Returns:
        What is written.

    Raises:
        UnknownNameError: When there is no such recipe.
        RecipeError: When it cannot be read.
    """
    path, over = find(name, registry), overrides or {}
    overridden = [
        f"{table}.{key}" for table, keys in over.items() if isinstance(keys, Mapping) for key in keys
    ]
    return Written(path, merge(merged(read_layers(path, registry)), over), overridden)


def sort_tables(
    tables: Mapping[str, Any], known: Sequence[str], faults: list[str]
) -> dict[str, Mapping[str, Any]]:
    """Keeps the tables among what a recipe says.

    Args:
        tables: What it says.
        known: Names of the tables it may have.
        faults: Every fault is added here.

    Returns:
        The tables.
    """
    for table, values in tables.items():
        if table not in known and isinstance(values, Mapping):
            faults.append(f"unknown table [{table}]{nearest(table, known)}")
        elif table not in known:
            where = f"known tables: {', '.join(sorted(known))}"
            faults.append(f"{table}: expected it inside a table, found it outside of all ({where})")
    faults += [
        f"{table}: expected a table, found {value!r}"
        for table, value in tables.items()
        if table in known and not isinstance(value, Mapping)
    ]
    sorted_tables = {table: values for table, values in tables.items() if isinstance(values, Mapping)}
    for table, values in sorted_tables.items():
        faults += empty_places(table, values)
    return sorted_tables


def used_class(
    tables: Mapping[str, Mapping[str, Any]], table: str, kind: str, registry: Registry, faults: list[str]
) -> Any:
    """The class that a table's `use` names.

    Args:
        tables: The tables.
        table: Which of them.
        kind: What it should be, as the registry calls it.
        registry: What is installed.
        faults: Every fault is added here.

    Returns:
        The class; None when there is none.
    """
    use = tables.get(table, {}).get("use")
    if not isinstance(use, str):
        found = "nothing" if use is None else repr(use)
        known = nearest("", registry.components[kind])
        faults.append(f"{table}.use: expected a name, found {found}{known}")
        return None
    try:
        return registry.component(kind, use)
    except (UnknownNameError, PluginError) as error:
        faults.append(f"{table}.use: {error}")
        return None


@attrs.frozen
class Layer:
    """One of the files a recipe is made of.

    Attributes:
        path: The file.
        tables: What it says, unchecked.
    """

    path: Path
    tables: dict[str, Any]


def read_layers(path: Path, registry: Registry, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """Reads a file and what it extends.

    Args:
        path: The file.
        registry: What is installed.
        seen: Files that extend it.

    Returns:
        The files, what extends another behind it.

    Raises:
        RecipeError: When a file cannot be read, or extends itself.
    """
    path = path.resolve()
    if path in seen:
        way = " -> ".join(file.name for file in (*seen, path))
        raise RecipeError(f"{path}: extends itself ({way})")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # nested too deep, or a number of thousands of digits
        raise RecipeError(f"{path}: not valid TOML ({first_line(error)})") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    tables = anchored(tables, path.parent)
    base = tables.pop("extends", None)
    if base is None:
        return [Layer(path, tables)]
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends: expected a recipe's name, found {base!r}")
    try:
        # Never a file of the working directory: what a recipe comes to does not depend on where one stands.
        below = find(path.parent / base, registry) if base.endswith(".toml") else registry.recipe(base)
    except (UnknownNameError, PluginError) as error:
        raise RecipeError(f"{path}: extends: {error}") from None
    return [*read_layers(below, registry, (*seen, path)), Layer(path, tables)]


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """What files say together.

    Args:
        layers: From `read_layers`.

    Returns:
        Their tables, each laid over those before.
    """
    tables: dict[str, Any] = {}
    for layer in layers:
        tables = merge(tables, layer.tables)
    return tables


def origins(layers: Sequence[Layer]) -> dict[tuple[str, str], Path]:
    """Which file each value of a recipe comes from.

    Args:
        layers: From `read_layers`.

    Returns:
        The file by table and key.
    """
    tables: dict[str, Any] = {}
    found: dict[tuple[str, str], Path] = {}
    for layer in layers:
        tables = merge(tables, layer.tables)
        places = [(table, key) for table, rest in tables.items() if isinstance(rest, Mapping) for key in rest]
        found = {
            (table, key): layer.path if key in layer.tables.get(table, {}) else found[table, key]
            for table, key in places
        }
    return found


def parse_overrides(assignments: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Reads assignments like `selector.budget=31`.

    Args:
        assignments: `table.key=value`; a value is typed as in TOML, and a string when it is none.

    Returns:
        Tables to lay over a recipe.

    Raises:
        RecipeError: For anything else, listing every fault.
    """
    tables: dict[str, dict[str, Any]] = {}
    faults = []
    for assignment in assignments:
        place, equals, text = assignment.partition("=")
        table, dot, key = place.strip().partition(".")
        if not (equals and dot and table and key):
            faults.append(f"expected table.key=value, found {assignment!r}")
            continue
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        except (ValueError, RecursionError) as error:
            faults.append(f"{place.strip()}: cannot be read ({first_line(error)})")
            continue
        tables.setdefault(table, {})[key] = value
    if faults:
        raise RecipeError(bullet_list("overrides", faults))
    # A folder given on the command line is one seen from there.
    return anchored(tables, Path.cwd())


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lays tables over others, key by key.

    Args:
        base: The tables below.
        over: The tables above. One that names another component replaces the table below it, whose
            options belong to the component it no longer uses.

    Returns:
        The merged tables.
    """
    merged = dict(base)
    for table, values in over.items():
        below = base.get(table)
        if isinstance(below, Mapping) and isinstance(values, Mapping):
            used = below.get("use", DEFAULT_USE.get(table))
            same = values.get("use", used) == used
            values = {**below, **values} if same else values
        merged[table] = values
    return merged
