"""Classes that a recipe names by their module, `module:Class`: one's own, without a package around them."""

import importlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from treeflash.errors import PluginError, UnknownNameError, nearest, spelled
from treeflash.returned import spell_value


def imported(name: str, base: type[Any]) -> type[Any]:
    """Imports a class.

    Args:
        name: `module:Class`. The module is looked for on Python's path and then in the working directory.
        base: What the class must derive from.

    Returns:
        The class.

    Raises:
        UnknownNameError: When there is no such module, or no such class in it.
        PluginError: When the module cannot be imported.
    """
    place, _, attribute = name.partition(":")
    if not (attribute.isidentifier() and all(part.isidentifier() for part in place.split("."))):
        raise UnknownNameError(f"expected module:Class like mymodule:MyClass, found {name!r}")
    module = _module(place)
    found = getattr(module, attribute, None)
    if isinstance(found, type) and issubclass(found, base):
        return found
    if found is not None:
        other = f"the class {found.__name__}" if isinstance(found, type) else spell_value(found)
        raise UnknownNameError(f"{name!r}: expected a class that derives from {base.__name__}, found {other}")
    fitting = [
        key
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    raise UnknownNameError(
        f"{name!r}: {module.__name__} ({getattr(module, '__file__', 'built in')}) has no {attribute}"
        f"{nearest(attribute, fitting)}"
    )


def _module(name: str) -> ModuleType:
    try:
        with _working_directory_last():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever the module raises; sys.exit raises no Exception
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            hint = f"; write {name.removesuffix('.py')}:Class" if name.endswith(".py") else ""
            raise UnknownNameError(
                f"no module {name!r} on Python's path or in the working directory, {Path.cwd()}{hint}"
            ) from None
        where = ""
        if not isinstance(error, SyntaxError):  # which says so itself
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f" ({frame.filename}, line {frame.lineno})"
        raise PluginError(f"module {name!r} cannot be imported: {spelled(error)}{where}") from error


@contextmanager
def _working_directory_last() -> Iterator[None]:
    """Lets modules of the working directory be found, but none of them hide an installed one."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    importlib.invalidate_caches()  # a file that was just written is to be seen
    try:
        yield
    finally:
        if folder in sys.path:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(folder)]
