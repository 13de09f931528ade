"""Finding what is installed: one registry, asked by kind and name."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs

from treeflash import hookspecs
from treeflash.errors import PluginError, TreeflashError, UnknownNameError, nearest, spelled
from treeflash.imported import imported
from treeflash.plugin_loading import CHOICE, Loaded

# The hook that gives each kind of component.
_HOOKS = {
    "drafter": "treeflash_drafters",
    "builder": "treeflash_builders",
    "refiner": "treeflash_refiners",
    "selector": "treeflash_selectors",
    "verifier": "treeflash_verifiers",
    "trainable": "treeflash_trainables",
    "loss": "treeflash_losses",
}
# What a decoder is made of.
KINDS = ("drafter", "builder", "refiner", "selector", "verifier")
# The folder among recipes that holds studies.
_STUDIES = "studies"


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
        components: For each of `KINDS`, "trainable" and "loss", classes by name. A kind's hook is called when
            the kind is first asked for: components import torch, which takes seconds, and most commands that
            only list or complete need none.
        targets: Functions that return a model's folder, by name.
        recipes: Recipe files by name.
        studies: Study files by name: those in folders called studies among the recipes.
        claims: Names that several plugins bring, by kind and name, and who brings them; none of them is in
            the mappings above. Of components, those of the kinds that were asked for.
        failures: What went wrong so far with each plugin that has a fault, by name.
    """

    components: Mapping[str, Mapping[str, Registered]]
    targets: Mapping[str, Registered]
    recipes: Mapping[str, Registered]
    studies: Mapping[str, Registered]
    claims: Mapping[tuple[str, str], Sequence[str]]
    failures: Mapping[str, Sequence[str]]

    @classmethod
    def load(cls) -> Self:
        """Asks the built-in parts and every installed plugin.

        Returns:
            A registry of its own; nothing is kept between two calls.

        Raises:
            PluginError: When `TREEFLASH_PLUGINS` names a plugin that is not installed.
        """
        loaded, claims = Loaded.of_installed(), _Claims()
        targets = claims.settle("target", _named(loaded, "treeflash_targets", callable))
        files = list(_files(loaded))
        recipes = claims.settle("recipe", (item for item in files if not _is_study(item)))
        studies = claims.settle("study", filter(_is_study, files))
        return cls(_Components(loaded, claims), targets, recipes, studies, claims.contested, loaded.failures)

    def component(self, kind: str, name: str) -> type[Any]:
        """Finds a component class.

        Args:
            kind: One of `KINDS`, "trainable" or "loss".
            name: As a recipe names it: a registered name, or `module:Class` for a class that no plugin
                registers.

        Returns:
            The class.

        Raises:
            UnknownNameError: When there is none.
            PluginError: When several plugins bring one, or the module cannot be imported.
        """
        if ":" in name:
            return imported(name, _base(kind))
        found: type[Any] = self._find(self.components[kind], kind, name)
        return found

    def target(self, name: str) -> Path | None:
        """Finds a target that a plugin provides, and lets the plugin bring it to the disk.

        Args:
            name: As a recipe names it.

        Returns:
            The model's folder; None when no plugin provides a target of that name.

        Raises:
            PluginError: When several plugins provide it, or the plugin fails.
        """
        self._refuse_claimed("target", name)
        if name not in self.targets:
            return None
        found = self.targets[name]
        try:
            folder = found.value()
        except TreeflashError:
            raise
        except Exception as error:  # whatever a stranger's function raises
            raise PluginError(f"plugin {found.origin}: target {name!r}: {spelled(error)}") from error
        if not isinstance(folder, str | Path) or not Path(folder).is_dir():
            raise PluginError(f"plugin {found.origin}: target {name!r}: expected a folder, found {folder!r}")
        return Path(folder)

    def recipe(self, name: str) -> Path:
        """Finds a recipe file by name.

        Args:
            name: The file's name without its ending.

        Returns:
            The file.

        Raises:
            UnknownNameError: When there is none.
            PluginError: When several plugins bring one.
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
            PluginError: When several plugins bring one.
        """
        found: Path = self._find(self.studies, "study", name)
        return found

    def _find(self, among: Mapping[str, Registered], kind: str, name: str) -> Any:
        self._refuse_claimed(kind, name)
        if name in among:
            return among[name].value
        clause = nearest(name, among)
        if kind == "recipe" and "known:" not in clause:  # too many to name
            clause += " (treeflash recipes list names all)"
        raise UnknownNameError(f"no {kind} is called {name!r}{clause}{self.failed_clause}")

    def _refuse_claimed(self, kind: str, name: str) -> None:
        origins = self.claims.get((kind, name))
        if origins is not None:
            raise PluginError(claimed(kind, name, origins))

    @property
    def failed_clause(self) -> str:
        """Which plugins failed and why, for messages about a name that nobody has."""
        return "".join(f"; plugin {plugin} failed: {'; '.join(why)}" for plugin, why in self.failures.items())


def claimed(kind: str, name: str, origins: Sequence[str]) -> str:
    """Says that several plugins bring one name, and what to do.

    Args:
        kind: What it names.
        name: The name.
        origins: The plugins.

    Returns:
        A sentence.
    """
    plugins = [origin for origin in origins if origin != hookspecs.PROJECT]
    off = " or ".join(f"{CHOICE}=-{plugin}" for plugin in plugins)
    return (
        f"{kind} {name!r} is claimed by {' and by '.join(origins)}; switch "
        f"{'one of them' if len(plugins) > 1 else plugins[0]} off with {off}, or uninstall it"
    )


class _Claims:
    """Settles which plugin a name belongs to.

    Attributes:
        contested: Names that several plugins bring, by kind and name, and the plugins.
    """

    def __init__(self) -> None:
        self.contested: dict[tuple[str, str], Sequence[str]] = {}

    def settle(self, kind: str, items: Iterable[tuple[str, Registered]]) -> dict[str, Registered]:
        """Sorts what plugins bring by name.

        Args:
            kind: What it is.
            items: Names and what they stand for.

        Returns:
            What one plugin alone brings, and brings once.
        """
        found: dict[str, list[Registered]] = {}
        for name, item in items:
            found.setdefault(name, []).append(item)
        for name, several in found.items():
            if len(several) > 1:
                self.contested[kind, name] = [item.origin for item in several]
        return {name: several[0] for name, several in found.items() if len(several) == 1}


class _Components(Mapping[str, Mapping[str, Registered]]):
    """The components by kind, each kind as soon as it is asked for."""

    def __init__(self, loaded: Loaded, claims: _Claims) -> None:
        self._loaded, self._claims = loaded, claims
        self._found: dict[str, Mapping[str, Registered]] = {}

    def __getitem__(self, kind: str) -> Mapping[str, Registered]:
        if kind not in self._found:
            named = _named(self._loaded, _HOOKS[kind], _is_a(_base(kind)))
            self._found[kind] = self._claims.settle(kind, named)
        return self._found[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(_HOOKS)

    def __len__(self) -> int:
        return len(_HOOKS)


def _base(kind: str) -> type[Any]:
    """What the components of a kind derive from."""
    from treeflash.interfaces import INTERFACES
    from treeflash.trainable import Loss, Trainable

    bases: dict[str, type[Any]] = {**INTERFACES, "trainable": Trainable, "loss": Loss}
    return bases[kind]


def _named(loaded: Loaded, hook: str, fits: Callable[[Any], bool]) -> Iterator[tuple[str, Registered]]:
    for plugin, answer in loaded.answers(hook):
        if not isinstance(answer, Mapping):
            loaded.blame(plugin, f"{hook}: expected what its specification returns, found {answer!r}")
            continue
        for name, value in answer.items():
            if isinstance(name, str) and fits(value):
                yield name, Registered(value, plugin.distribution)
            else:
                loaded.blame(
                    plugin, f"{hook}: expected what its specification returns, found {{{name!r}: {value!r}}}"
                )


def _is_a(base: type[Any]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, type) and issubclass(value, base)


def _files(loaded: Loaded) -> Iterator[tuple[str, Registered]]:
    """Recipe files and study files."""
    for plugin, folder in loaded.answers("treeflash_recipes"):
        if not isinstance(folder, str | Path) or not Path(folder).is_dir():
            loaded.blame(plugin, f"treeflash_recipes: expected a folder, found {folder!r}")
            continue
        for file in sorted(Path(folder).rglob("*.toml")):
            yield file.stem, Registered(file, plugin.distribution)


def _is_study(item: tuple[str, Registered]) -> bool:
    file: Path = item[1].value
    return file.parent.name == _STUDIES
