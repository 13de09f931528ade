"""Importing the installed plugins and calling their hooks; no fault of theirs ends the program."""

import importlib.metadata
import inspect
import os
from collections.abc import Iterator
from typing import Any, Self

import attrs
import pluggy

from treeflash import builtin, hookspecs
from treeflash.errors import PluginError, nearest, spelled

# Distributions to load plugins of, by comma; with a minus sign, those to leave out. Unset loads all.
CHOICE = "TREEFLASH_PLUGINS"
HOOKS = [name for name in vars(hookspecs) if name.startswith(f"{hookspecs.PROJECT}_")]


@attrs.frozen
class Plugin:
    """An entry point.

    Attributes:
        distribution: The package it belongs to.
        entry: Its own name; empty for the built-in parts, which have none.
    """

    distribution: str
    entry: str = ""

    def __str__(self) -> str:
        return f"{self.distribution}:{self.entry}"


@attrs.frozen
class Loaded:
    """The built-in parts and the plugins that were imported.

    Attributes:
        plugins: Each by the name that the manager knows it by.
        manager: Knows their hooks.
        failures: Faults found so far, by distribution.
    """

    plugins: dict[str, Plugin] = attrs.field(factory=dict)
    manager: pluggy.PluginManager = attrs.field(init=False)
    failures: dict[str, list[str]] = attrs.field(factory=dict)

    @manager.default
    def _new_manager(self) -> pluggy.PluginManager:
        return _Manager(self)

    @classmethod
    def of_installed(cls) -> Self:
        """Imports the plugins that are installed and not switched off.

        Returns:
            What could be imported, and the faults of the rest.

        Raises:
            PluginError: When `TREEFLASH_PLUGINS` names a plugin that is not installed.
        """
        loaded = cls()
        loaded.register(builtin, Plugin(hookspecs.PROJECT))
        found = [
            (distribution.metadata["Name"], entries)  # which takes long to read: of those with plugins alone
            for distribution in importlib.metadata.distributions()
            if (entries := distribution.entry_points.select(group=hookspecs.PROJECT))
        ]
        chosen = _chosen([name for name, _ in found])
        for name, entries in found:
            for entry in entries if name in chosen else ():
                plugin = Plugin(name, entry.name)
                try:
                    module = entry.load()
                    # A distribution that is on the path twice is loaded once.
                    if not loaded.manager.is_registered(module):
                        loaded.register(module, plugin)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # whatever a plugin raises; sys.exit raises no Exception
                    loaded.blame(plugin, spelled(error))
        return loaded

    def register(self, module: Any, plugin: Plugin) -> None:
        """Takes up the hooks of a module.

        Args:
            module: What the entry point names.
            plugin: The entry point.
        """
        self.plugins[str(plugin)] = plugin
        self.manager.register(module, name=str(plugin))

    def blame(self, plugin: Plugin, fault: str) -> None:
        """Notes a fault.

        Args:
            plugin: Whose it is.
            fault: What is wrong.
        """
        where = f"entry point {plugin.entry}: " if plugin.entry else ""
        faults = self.failures.setdefault(plugin.distribution, [])
        if where + fault not in faults:  # a distribution that is on the path twice fails twice
            faults.append(where + fault)

    def answers(self, hook: str) -> Iterator[tuple[Plugin, Any]]:
        """Calls a hook of each plugin.

        Args:
            hook: Its name.

        Yields:
            The plugin and what it returned, in a fixed order; one that raises is noted and left out.
        """
        for item in getattr(self.manager.hook, hook).get_hookimpls():
            plugin = self.plugins[item.plugin_name]
            try:
                answer = item.function()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as above
                self.blame(plugin, f"{hook}: {spelled(error)}")
                continue
            yield plugin, answer


class _Manager(pluggy.PluginManager):
    """Leaves out the hooks that are at fault, where pluggy would refuse the plugin for the first of them.

    Args:
        loaded: Who notes the faults.
    """

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(hookspecs.PROJECT)
        self._loaded = loaded
        self.add_hookspecs(hookspecs)

    def register(self, plugin: Any, name: str | None = None) -> str | None:
        """Notes which hooks are at fault before it takes up the others."""
        for attribute in dir(plugin):
            fault = self._fault(plugin, attribute)
            if fault is not None:
                self._loaded.blame(self._loaded.plugins[str(name)], fault)
        return super().register(plugin, name)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """What pluggy would say of a function; None when it is at fault."""
        found = super().parse_hookimpl_opts(plugin, name)
        return None if self._fault(plugin, name) else found

    def _fault(self, plugin: Any, name: str) -> str | None:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None:
            if name in HOOKS and inspect.isroutine(getattr(plugin, name)):
                return f"{name}: expected the decorator treeflash.hookspecs.hookimpl on it, found none"
            return None
        hook = options.get("specname") or name
        if hook not in HOOKS:
            return f"{hook}: there is no such hook{nearest(hook, HOOKS)}"
        if options.get("wrapper") or options.get("hookwrapper"):
            return f"{hook}: expected a function that returns what it adds, found a wrapper of others"
        parameters = inspect.signature(getattr(plugin, name)).parameters
        return f"{hook}: expected no parameters, found {', '.join(parameters)}" if parameters else None


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
