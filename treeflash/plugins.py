"""Finding what is installed: one registry, asked by kind and name."""

import importlib.metadata
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import attrs
import pluggy

from treeflash import builtin, hookspecs
from treeflash.errors import PluginError, UnknownNameError, first_line, nearest
from treeflash.interfaces import Drafter, Refiner, Selector, TreeBuilder, Verifier
from treeflash.trainable import Loss, Trainable

# The hook that gives each kind, and what it gives.
_HOOKS: dict[str, tuple[str, type[Any]]] = {
    "drafter": ("treeflash_drafters", Drafter),
    "builder": ("treeflash_builders", TreeBuilder),
    "refiner": ("treeflash_refiners", Refiner),
    "selector": ("treeflash_selectors", Selector),
    "verifier": ("treeflash_verifiers", Verifier),
    "trainable": ("treeflash_trainables", Trainable),
    "loss": ("treeflash_losses", Loss),
}
# What a decoder is made of.
KINDS = ("drafter", "builder", "refiner", "selector", "verifier")
# The folder among recipes that holds studies.
_STUDIES = "studies"
# Distributions to load plugins of, by comma; with a minus sign, those to leave out. Unset loads all.
CHOICE = "TREEFLASH_PLUGINS"


@attrs.frozen
class Registered:
    """Something a plugin added.

    Attributes:
        value: What it added.
        origin: The plugin's name.
    """

    value: Any
    origin: str


@attrs.frozen
class Registry:
    """Everything installed, by kind and name.

    Attributes:
        components: For each of `KINDS`, "trainable" and "loss", classes by name.
        targets: Functions that return a model's folder, by name.
        recipes: Recipe files by name.
        studies: Study files by name: those in folders called studies among the recipes.
        failures: Plugins that could not be loaded and why, by name.
    """

    components: Mapping[str, Mapping[str, Registered]]
    targets: Mapping[str, Registered]
    recipes: Mapping[str, Registered]
    studies: Mapping[str, Registered]
    failures: Mapping[str, str]

    @classmethod
    def load(cls) -> Self:
        """Asks the built-in parts and every installed plugin.

        Returns:
            A registry of its own; nothing is kept between two calls.

        Raises:
            PluginError: When two plugins claim one name, or `TREEFLASH_PLUGINS` names one that is not
                installed.
        """
        failures: dict[str, str] = {}
        manager = _manager(failures)
        components = {
            kind: _named(manager, hook, _is_a(base), failures) for kind, (hook, base) in _HOOKS.items()
        }
        targets = _named(manager, "treeflash_targets", callable, failures)
        recipes, studies = _recipes(manager, failures)
        return cls(components, targets, recipes, studies, failures)

    def component(self, kind: str, name: str) -> type[Any]:
        """Finds a component class.

        Args:
            kind: One of `KINDS`, "trainable" or "loss".
            name: As a recipe names it.

        Returns:
            The class.

        Raises:
            UnknownNameError: When there is none.
        """
        found: type[Any] = self._find(self.components[kind], kind, name)
        return found

    def target(self, name: str) -> Callable[[], Path] | None:
        """Finds a target that a plugin provides; None when the name is not one."""
        found = self.targets.get(name)
        return None if found is None else found.value

    def recipe(self, name: str) -> Path:
        """Finds a recipe file by name.

        Args:
            name: The file's name without its ending.

        Returns:
            The file.

        Raises:
            UnknownNameError: When there is none.
        """
        found: Path = self._find(self.recipes, "recipe", name)
        return found

    def study(self, name: str) -> Path:
        """Finds a study file by name.

        Args:
            name: The file's name without its ending.

        Returns:
            The file.

        Raises:
            UnknownNameError: When there is none.
        """
        found: Path = self._find(self.studies, "study", name)
        return found

    def _find(self, among: Mapping[str, Registered], kind: str, name: str) -> Any:
        if name in among:
            return among[name].value
        clause = nearest(name, among)
        if kind == "recipe" and "known:" not in clause:  # too many to name
            clause += " (treeflash recipes list names all)"
        raise UnknownNameError(f"no {kind} is called {name!r}{clause}{self.failed_clause}")

    @property
    def failed_clause(self) -> str:
        """Which plugins failed and why, for messages about a name that nobody has."""
        return "".join(f"; plugin {plugin} failed: {why}" for plugin, why in self.failures.items())


def _manager(failures: dict[str, str]) -> pluggy.PluginManager:
    """A manager of its own, with the built-in parts and every installed plugin that can be loaded."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(builtin, name=hookspecs.PROJECT)
    found = [
        (distribution.metadata["Name"], distribution.entry_points.select(group=hookspecs.PROJECT))
        for distribution in importlib.metadata.distributions()
    ]
    chosen = _chosen([name for name, entries in found if entries])
    for name, entries in found:
        for entry in entries if name in chosen else ():
            try:
                plugin = entry.load()
                if not manager.is_registered(plugin):
                    manager.register(plugin, name=f"{name}:{entry.name}")
                    manager.check_pending()
            except Exception as error:  # whatever a stranger's module raises
                failures[name] = f"{type(error).__name__}: {first_line(error)}"
                manager.unregister(name=f"{name}:{entry.name}")
    return manager


def _chosen(installed: list[str]) -> set[str]:
    """Which distributions' plugins the environment asks for."""
    text = os.environ.get(CHOICE)
    if text is None:
        return set(installed)
    names = [name.strip() for name in text.split(",") if name.strip()]
    without = {name[1:].strip() for name in names if name.startswith("-")}
    wanted = {name for name in names if not name.startswith("-")}
    for name in sorted((without | wanted) - set(installed)):
        raise PluginError(f"{CHOICE}: no plugin {name!r} is installed{nearest(name, set(installed))}")
    # Leaving some out means all others; naming some means these alone.
    return (wanted if wanted or not without else set(installed)) - without


def _answers(manager: pluggy.PluginManager, hook: str, failures: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """What each plugin answers to a hook, by distribution, in a fixed order."""
    for item in getattr(manager.hook, hook).get_hookimpls():
        origin = item.plugin_name.partition(":")[0]
        try:
            yield origin, item.function()
        except Exception as error:  # whatever a stranger's module raises
            failures[origin] = f"{hook}: {type(error).__name__}: {first_line(error)}"


def _named(
    manager: pluggy.PluginManager, hook: str, fits: Callable[[Any], bool], failures: dict[str, str]
) -> dict[str, Registered]:
    merged: dict[str, Registered] = {}
    for origin, answer in _answers(manager, hook, failures):
        if not isinstance(answer, Mapping) or not all(fits(value) for value in answer.values()):
            failures[origin] = f"{hook}: expected what its specification returns, found {answer!r}"
            continue
        for name, value in answer.items():
            _add(merged, name, Registered(value, origin), hook)
    return merged


def _is_a(base: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, type) and issubclass(value, base)


def _recipes(
    manager: pluggy.PluginManager, failures: dict[str, str]
) -> tuple[dict[str, Registered], dict[str, Registered]]:
    """Recipe files and study files."""
    recipes: dict[str, Registered] = {}
    studies: dict[str, Registered] = {}
    for origin, folder in _answers(manager, "treeflash_recipes", failures):
        if not isinstance(folder, str | Path) or not Path(folder).is_dir():
            failures[origin] = f"treeflash_recipes: expected a folder, found {folder!r}"
            continue
        for file in sorted(Path(folder).rglob("*.toml")):
            found = studies if file.parent.name == _STUDIES else recipes
            _add(found, file.stem, Registered(file, origin), "treeflash_recipes")
    return recipes, studies


def _add(merged: dict[str, Registered], name: str, item: Registered, hook: str) -> None:
    if name in merged:
        raise PluginError(
            f"{hook}: {name!r} is claimed by {merged[name].origin} and by {item.origin}; "
            "uninstall one of them"
        )
    merged[name] = item
