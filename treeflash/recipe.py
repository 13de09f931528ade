"""From a recipe file to a decoder.

A recipe is a TOML file with a table per part. `use` names the component, the other keys are its
options. `extends` names another recipe to start from.

What builds a decoder is imported where it is used: a recipe's outline is checked without torch.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs
from attrs.validators import in_, min_len, optional

from treeflash.errors import InputError, RecipeError, blamed_on, bullet_list, nearest
from treeflash.places import locate, on_disk
from treeflash.plugins import KINDS, Registered, Registry
from treeflash.ranges import AUTO, DTYPE_NAMES, FASTEST
from treeflash.recipe_tables import DEFAULT_USE, Written, merge, open_tables, sort_tables, used_class
from treeflash.returned import named, spell_value
from treeflash.structuring import structure

if TYPE_CHECKING:
    from treeflash.engine import Decoder
    from treeflash.interfaces import BuildContext
    from treeflash.target import HuggingFaceTarget
    from treeflash.target_interface import Target

_TABLES = ("target", *KINDS)
# Parts that a recipe need not name.
DEFAULTS = {kind: {"use": DEFAULT_USE[kind]} for kind in ("selector", "verifier")}


@attrs.frozen
class TargetOptions:
    """What a recipe says of the target.

    Attributes:
        model: A target that a plugin provides, a folder, or a hub name.
        dtype: "auto" takes the model's own; "fastest" takes bfloat16 where the device has instructions for
            its products, and float32 elsewhere.
        device: "auto" takes a GPU when there is one.
        trust_remote_code: Run code that comes with the model. Without, a model that needs its own code is
            refused.
        revision: Branch, tag or commit of a model on the hub.
        lean: Read the model by a pass of our own where its family is known, which is faster; on a CPU it
            holds the weights of bfloat16 models twice. Without, the model's own forward is called.
        compile: Compile that pass before the first text: some minutes for a model of a few layers, over a
            quarter of an hour for thirty, and on a CPU the weights twice more, for faster passes from then
            on. It needs a C++ compiler, on a GPU Triton; where it fails there is a warning.
    """

    model: str
    dtype: str = attrs.field(default=AUTO, validator=in_((AUTO, FASTEST, *DTYPE_NAMES)))
    device: str = "auto"
    trust_remote_code: bool = False
    revision: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    lean: bool = True
    compile: bool = False


@attrs.frozen
class Part:
    """A component and its options.

    Attributes:
        use: Its name.
        component: Its class.
        options: An instance of the class's options; the component itself if it was given ready-made.
        ready: Whether it was.
    """

    use: str
    component: Any
    options: Any
    ready: bool = False

    def build(self, context: "BuildContext") -> Any:
        """Makes the component, unless it was given."""
        return self.options if self.ready else self.component.from_options(self.options, context)


@attrs.frozen
class Recipe:
    """A checked recipe: all names known, all options of the right type, all parts fitting.

    Attributes:
        path: The file.
        name: What messages call it: the file, and what was laid over it.
        target: What to decode.
        parts: The components by kind; a builder and refiner are there when the drafter needs them.
    """

    path: Path
    name: str = attrs.field(eq=False)
    target: TargetOptions
    parts: Mapping[str, Part]

    @classmethod
    def load(cls, name: str | Path, registry: Registry, overrides: Mapping[str, Any] | None = None) -> Self:
        """Reads a recipe and checks it, without touching a model.

        Args:
            name: A recipe's name, or the path of a TOML file.
            registry: What is installed.
            overrides: Tables laid over the file's, and components in the place of tables.

        Returns:
            The recipe.

        Raises:
            UnknownNameError: When there is no such recipe.
            RecipeError: Listing every fault.
        """
        written, given = _opened(name, registry, overrides or {})
        faults: list[str] = []
        tables, target = _outline(written, given, faults)
        others = len(faults)
        used = _components(tables, given, registry, faults)
        if "drafter" in used and len(faults) == others:
            names = {
                kind: used[kind].__name__ if kind in given else repr(tables[kind]["use"]) for kind in used
            }
            faults += _misfits(used, names, registry)
        parts: dict[str, Part] = {}
        for kind, component in used.items():
            if kind in given:
                parts[kind] = Part(component.__name__, component, given[kind], ready=True)
                continue
            rest = {key: value for key, value in tables[kind].items() if key != "use"}
            takers = partial(_takers, registry.components[kind])
            options = structure(rest, component.options_class(), kind, faults, takers)
            parts[kind] = Part(tables[kind]["use"], component, options)
        if faults or target is None:
            raise RecipeError(bullet_list(written.name, faults))
        return cls(written.path, written.name, target, parts)

    @staticmethod
    def check_outline(
        name: str | Path, registry: Registry, overrides: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Checks as much of a recipe as needs no component, which takes seconds to import.

        Args:
            name: A recipe's name, or the path of a TOML file.
            registry: What is installed.
            overrides: Tables laid over the file's.

        Raises:
            UnknownNameError: When there is no such recipe.
            RecipeError: Listing every fault of its tables, and of `[target]`.
        """
        written, faults = open_tables(name, registry, overrides), list[str]()
        _outline(written, (), faults)
        if faults:
            raise RecipeError(bullet_list(written.name, faults))

    def build(
        self,
        registry: Registry,
        target: "Target | None" = None,
        *,
        progress: Callable[[str, int, int], None] = lambda task, done, total: None,
        by_clock: bool = True,
    ) -> "Decoder":
        """Loads the models and puts the parts together.

        Args:
            registry: What is installed.
            target: Decodes this one in place of the recipe's, to compare recipes on one target.
            progress: As in `BuildContext`.
            by_clock: As in `BuildContext`.

        Returns:
            The decoder.

        Raises:
            TreeflashError: When a model or checkpoint is not to be had or does not fit; the message
                names the recipe.
        """
        from treeflash.engine import Decoder
        from treeflash.interfaces import BuildContext

        with blamed_on(self.name):
            target = self.load_target(registry) if target is None else target
            checkpoint = getattr(self.parts["drafter"].options, "checkpoint", None)
            components = {}
            for kind, part in self.parts.items():
                context = BuildContext(
                    target,
                    locate=partial(locate, key=f"{kind}.checkpoint"),
                    drafter_checkpoint=checkpoint,
                    find_model=partial(find_model, registry=registry, key=f"{kind}.model"),
                    progress=progress,
                    by_clock=by_clock,
                )
                components[kind] = part.build(context)
            return Decoder(target, **components)

    def locate_target(self, registry: Registry) -> str | Path:
        """Makes sure that the target is on disk, where a plugin provides it: that may be a download.

        Args:
            registry: What is installed.

        Returns:
            Its folder, or a hub name.

        Raises:
            TreeflashError: When it is not to be had.
        """
        return find_model(self.target.model, registry, "target.model")

    def load_target(self, registry: Registry) -> "Target":
        """Loads the target alone.

        Args:
            registry: What is installed.

        Returns:
            The target, checked.

        Raises:
            TreeflashError: When it is not to be had or cannot be verified in trees.
        """
        return open_target(self.target, registry)


def open_target(options: TargetOptions, registry: Registry) -> "HuggingFaceTarget":
    """Loads the target that a recipe names.

    Args:
        options: What the recipe says of it.
        registry: What is installed.

    Returns:
        The target, checked.

    Raises:
        TreeflashError: When it is not to be had or cannot be verified in trees.
    """
    from treeflash.target import load_target

    place = find_model(options.model, registry, "target.model")
    return load_target(
        place,
        dtype=options.dtype,
        device=options.device,
        lean=options.lean,
        compiled=options.compile,
        trust_remote_code=options.trust_remote_code,
        revision=options.revision,
    )


def find_model(name: str, registry: Registry, key: str) -> str | Path:
    """Finds a model.

    Args:
        name: A target that a plugin provides, a folder, `package:path`, or a hub name.
        registry: What is installed.
        key: Where a recipe names it, for messages.

    Returns:
        Its folder, or the hub name.

    Raises:
        InputError: When it can be none of these.
    """
    provided = registry.target(name)
    if provided is not None:
        return provided
    folder = on_disk(name, key)
    if folder is None and ("/" not in name or ":" in name or name.startswith((".", "/", "~"))):
        hint = f"{nearest(name, registry.targets)}{registry.failed_clause}"
        raise InputError(f"{key}: no folder, hub name or target is called {name!r}{hint}")
    return folder or name


def load(name: str | Path, **overrides: Any) -> "Decoder":
    """Builds the decoder of a recipe.

    Args:
        name: A recipe's name, or the path of a TOML file.
        **overrides: Tables laid over the file's, for instance `selector={"budget": 31}`; or what replaces a
            table, a component such as `selector=OptTree(31)` or a target that is loaded already.

    Returns:
        The decoder.

    Raises:
        TreeflashError: When the recipe, a model or a checkpoint is at fault.
    """
    registry, target = Registry.load(), overrides.get("target")
    if target is None or isinstance(target, Mapping | str):
        return Recipe.load(name, registry, overrides).build(registry)
    tables = {table: values for table, values in overrides.items() if table != "target"}
    return Recipe.load(name, registry, tables).build(registry, target)


def _opened(
    name: str | Path, registry: Registry, overrides: Mapping[str, Any]
) -> tuple[Written, dict[str, Any]]:
    """What a recipe says with tables laid over it, and what was given in the place of tables."""
    given = {
        kind: value for kind, value in overrides.items() if kind in KINDS and not isinstance(value, Mapping)
    }
    written = open_tables(name, registry, {kind: overrides[kind] for kind in overrides if kind not in given})
    return attrs.evolve(written, overridden=[*written.overridden, *given]), given


def _outline(
    written: Written, given: Collection[str], faults: list[str]
) -> tuple[dict[str, Mapping[str, Any]], TargetOptions | None]:
    """A recipe's tables, but for parts that are given, and what it says of the target if that is right."""
    if "train" in written.tables:
        raise RecipeError(
            f"{written.name}: this recipe trains a drafter (treeflash train); expected one that decodes, "
            "like the one that such a run leaves beside the drafter"
        )
    tables = sort_tables(merge(DEFAULTS, written.tables), _TABLES, faults)
    target = structure(tables.get("target", {}), TargetOptions, "target", faults)
    if "drafter" not in written.tables and "drafter" not in given:
        faults.append('[drafter]: expected a table with a key use (use = "none" decodes plainly)')
    return tables, target


def _components(
    tables: Mapping[str, Mapping[str, Any]],
    given: Mapping[str, Any],
    registry: Registry,
    faults: list[str],
) -> dict[str, Any]:
    """The classes that the tables use, as far as they are known; parts that are none are left out."""
    from treeflash.interfaces import INTERFACES

    used: dict[str, Any] = {}
    for kind in KINDS:
        if kind in given:
            base = INTERFACES[kind]
            if isinstance(given[kind], base):
                used[kind] = type(given[kind])
            else:
                faults.append(f"{kind}: expected a table or {named(base)}, found {spell_value(given[kind])}")
            continue
        if kind not in tables:
            continue
        if kind == "builder" and tables[kind].get("use") == "none":
            continue  # how an override takes away the builder of the recipe it changes
        component = used_class(tables, kind, kind, registry, faults)
        if component is not None:
            used[kind] = component
    drafter = used.get("drafter")
    if drafter is not None and not getattr(drafter, "drafts_blocks", True):
        if "refiner" not in given and tables.get("refiner", {}).get("use") == "none":
            used.pop("refiner", None)
    return used


def _takers(components: Mapping[str, Registered], key: str) -> list[str]:
    """Which components have an option."""
    options = {name: found.value.options_class() for name, found in components.items()}
    return [name for name, of in options.items() if attrs.has(of) and key in attrs.fields_dict(of)]


def _misfits(used: Mapping[str, Any], names: Mapping[str, str], registry: Registry) -> list[str]:
    """Why the parts cannot stand behind one another, and what could stand where one is missing."""
    from treeflash.engine.decoder import misfits

    return [
        f"{kind}.use: {fault}{'' if kind in used else nearest('', registry.components[kind])}"
        for kind, fault in misfits(used, names).items()
    ]
