"""From a recipe file to a decoder.

A recipe is a TOML file with a table per part. `use` names the component, the other keys are its
options. `extends` names another recipe to start from.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from treeflash.engine import Decoder
from treeflash.engine.decoder import misfits
from treeflash.errors import (
    InputError,
    RecipeError,
    TreeflashError,
    UnknownNameError,
    bullet_list,
    nearest,
)
from treeflash.interfaces import BuildContext
from treeflash.places import anchored, locate, on_disk
from treeflash.plugins import KINDS, Registry
from treeflash.structuring import structure
from treeflash.target import HuggingFaceTarget, load_target
from treeflash.target_interface import Target

_DEFAULTS = {"selector": {"use": "opt-tree"}, "verifier": {"use": "sdpa-tree"}}
_TABLES = ("target", *KINDS)


@attrs.frozen
class TargetOptions:
    """What a recipe says of the target.

    Attributes:
        model: A target that a plugin provides, a folder, or a hub name.
        dtype: "auto" takes the model's own.
        device: "auto" takes a GPU when there is one.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"


@attrs.frozen
class Part:
    """A component and its options.

    Attributes:
        use: Its name.
        component: Its class.
        options: An instance of the class's options.
    """

    use: str
    component: Any
    options: Any


@attrs.frozen
class Recipe:
    """A checked recipe: all names known, all options of the right type, all parts fitting.

    Attributes:
        path: The file.
        target: What to decode.
        parts: The components by kind; a builder and refiner are there when the drafter needs them.
    """

    path: Path
    target: TargetOptions
    parts: Mapping[str, Part]

    @classmethod
    def load(
        cls, name: str | Path, registry: Registry, overrides: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Self:
        """Reads a recipe and checks it, without touching a model.

        Args:
            name: A recipe's name, or the path of a TOML file.
            registry: What is installed.
            overrides: Tables laid over the file's.

        Returns:
            The recipe.

        Raises:
            UnknownNameError: When there is no such recipe.
            RecipeError: Listing every fault.
        """
        path, written = open_tables(name, registry, overrides)
        if "train" in written:
            raise RecipeError(
                f"{path}: this recipe trains a drafter (treeflash train); expected one that decodes, like "
                "the one that such a run leaves beside the drafter"
            )
        faults: list[str] = []
        tables = sort_tables(merge(_DEFAULTS, written), _TABLES, faults)
        target = structure(tables.get("target", {}), TargetOptions, "target", faults)
        if "drafter" not in written:
            faults.append('[drafter]: expected a table with a key use (use = "none" decodes plainly)')
        others = len(faults)
        used = _components(tables, registry, faults)
        if "drafter" in used and len(faults) == others:
            faults += misfits(used["drafter"], used.get("builder"), used.get("refiner"))
        parts: dict[str, Part] = {}
        for kind, component in used.items():
            rest = {key: value for key, value in tables[kind].items() if key != "use"}
            options = structure(rest, component.options_class(), kind, faults)
            parts[kind] = Part(tables[kind]["use"], component, options)
        if faults or target is None:
            raise RecipeError(bullet_list(str(path), faults))
        return cls(path, target, parts)

    def build(self, registry: Registry, target: Target | None = None) -> Decoder:
        """Loads the models and puts the parts together.

        Args:
            registry: What is installed.
            target: Decodes this one in place of the recipe's, to compare recipes on one target.

        Returns:
            The decoder.

        Raises:
            TreeflashError: When a model or checkpoint is not to be had or does not fit; the message
                names the recipe.
        """
        try:
            target = self.load_target(registry) if target is None else target
            drafter = self.parts["drafter"]
            context = BuildContext(
                target=target,
                locate=locate,
                drafter_checkpoint=getattr(drafter.options, "checkpoint", None),
            )
            components = {
                kind: part.component.from_options(part.options, context) for kind, part in self.parts.items()
            }
            return Decoder(target, **components)
        except TreeflashError as error:
            error.args = (f"{self.path}: {error}",)
            raise

    def load_target(self, registry: Registry) -> Target:
        """Loads the target alone.

        Args:
            registry: What is installed.

        Returns:
            The target, checked.

        Raises:
            TreeflashError: When it is not to be had or cannot be verified in trees.
        """
        return open_target(self.target, registry)


def open_target(options: TargetOptions, registry: Registry) -> HuggingFaceTarget:
    """Loads the target that a recipe names.

    Args:
        options: What the recipe says of it.
        registry: What is installed.

    Returns:
        The target, checked.

    Raises:
        TreeflashError: When it is not to be had or cannot be verified in trees.
    """
    source = registry.target(options.model)
    if source is not None:
        place: str | Path = source()
    else:
        place = on_disk(options.model) or options.model
        if not isinstance(place, Path) and ("/" not in place or place.startswith((".", "/", "~"))):
            hint = nearest(place, registry.targets)
            raise InputError(f"[target] model: no folder, hub name or target is called {place!r}{hint}")
    return load_target(place, dtype=options.dtype, device=options.device)


def load(name: str | Path, **overrides: Mapping[str, Any]) -> Decoder:
    """Builds the decoder of a recipe.

    Args:
        name: A recipe's name, or the path of a TOML file.
        **overrides: Tables laid over the file's, for instance `selector={"budget": 31}`.

    Returns:
        The decoder.

    Raises:
        TreeflashError: When the recipe, a model or a checkpoint is at fault.
    """
    registry = Registry.load()
    return Recipe.load(name, registry, overrides).build(registry)


def find(name: str | Path, registry: Registry) -> Path:
    """Finds a recipe's file.

    Args:
        name: A recipe's name, or the path of a TOML file.
        registry: What is installed.

    Returns:
        The file.

    Raises:
        UnknownNameError: When there is none.
    """
    if isinstance(name, Path) or name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UnknownNameError(f"no recipe file {path}")
        return path
    return registry.recipe(name)


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
        tables.setdefault(table, {})[key] = value
    if faults:
        raise RecipeError(bullet_list("overrides", faults))
    return tables


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
            same = values.get("use", below.get("use")) == below.get("use")
            values = {**below, **values} if same else values
        merged[table] = values
    return merged


def open_tables(
    name: str | Path, registry: Registry, overrides: Mapping[str, Mapping[str, Any]] | None
) -> tuple[Path, dict[str, Any]]:
    """Finds a recipe and reads what it says.

    Args:
        name: A recipe's name, or the path of a TOML file.
        registry: What is installed.
        overrides: Tables laid over the file's.

    Returns:
        The file, and its tables, unchecked.

    Raises:
        UnknownNameError: When there is no such recipe.
        RecipeError: When it cannot be read.
    """
    path = find(name, registry)
    return path, merge(read_tables(path, registry), overrides or {})


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
    faults += [f"unknown table [{table}]{nearest(table, known)}" for table in tables if table not in known]
    faults += [
        f"{table}: expected a table, found {value!r}"
        for table, value in tables.items()
        if table in known and not isinstance(value, Mapping)
    ]
    return {table: values for table, values in tables.items() if isinstance(values, Mapping)}


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
    except UnknownNameError as error:
        faults.append(f"{table}.use: {error}")
        return None


def read_tables(path: Path, registry: Registry, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a file and what it extends.

    Args:
        path: The file.
        registry: What is installed.
        seen: Files that extend it.

    Returns:
        Its tables, unchecked.

    Raises:
        RecipeError: When a file cannot be read, or extends itself.
    """
    path = path.resolve()
    if path in seen:
        way = " -> ".join(file.name for file in (*seen, path))
        raise RecipeError(f"{path}: extends itself ({way})")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid TOML ({error})") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    tables = anchored(tables, path.parent)
    base = tables.pop("extends", None)
    if base is None:
        return tables
    if not isinstance(base, str):
        raise RecipeError(f"{path}: extends: expected a recipe's name, found {base!r}")
    name = str(path.parent / base) if base.endswith(".toml") else base
    try:
        below = find(name, registry)
    except UnknownNameError as error:
        raise RecipeError(f"{path}: extends: {error}") from None
    return merge(read_tables(below, registry, (*seen, path)), tables)


def _components(
    tables: Mapping[str, Mapping[str, Any]], registry: Registry, faults: list[str]
) -> dict[str, Any]:
    """The classes that the tables use, as far as they are known; parts that are none are left out."""
    used: dict[str, Any] = {}
    for kind in KINDS:
        if kind not in tables:
            continue
        if kind == "builder" and tables[kind].get("use") == "none":
            continue  # how an override takes away the builder of the recipe it changes
        component = used_class(tables, kind, kind, registry, faults)
        if component is not None:
            used[kind] = component
    drafter = used.get("drafter")
    if drafter is not None and not getattr(drafter, "drafts_blocks", True):
        if tables.get("refiner", {}).get("use") == "none":
            used.pop("refiner", None)
    return used
