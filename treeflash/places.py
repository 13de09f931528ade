"""Where models and checkpoints lie: in a folder, inside a package, or on the hub."""

import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeflash.errors import InputError, first_line, nearest

# Keys of a recipe that may hold a folder; a relative one is relative to the file that says so.
_KEYS = ("model", "checkpoint")
_EXPECTED = "expected a folder, package:path or hub name"
# Where "" would be the working directory, which nobody means by it.
_NEVER_EMPTY = {**dict.fromkeys(_KEYS, _EXPECTED), "states_folder": "expected a folder"}


def locate(place: str, key: str = "checkpoint") -> Path:
    """Finds a checkpoint's folder.

    Args:
        place: A folder, `package:path` inside an installed package, or a hub name.
        key: Where a recipe names it, for messages.

    Returns:
        The folder on disk, downloaded when it is on the hub.

    Raises:
        InputError: When there is none.
    """
    found = on_disk(place, key)
    if found is not None:
        return found
    if place.count("/") != 1 or place.startswith((".", "/", "~")) or ":" in place:
        raise InputError(f"{key}: {_EXPECTED}, found {place!r}, which is none")
    from huggingface_hub import snapshot_download  # only for checkpoints that are not on disk

    try:
        return Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise InputError(f"{key}: {place!r} is no folder and cannot be downloaded: {reason}") from error


def on_disk(place: str, key: str) -> Path | None:
    """Finds a folder, given as itself or as `package:path`.

    Args:
        place: The place. A folder comes first, whatever its name.
        key: Where a recipe names it, for messages.

    Returns:
        The folder; None when there is none, and the place may be a hub name.

    Raises:
        InputError: When the place is empty, or the package is not installed or has no such folder.
    """
    if not place.strip():
        raise InputError(f"{key}: {_EXPECTED}, found {place!r}")
    folder = os.path.expanduser(place)  # a user that there is not stays in the name
    if os.path.isdir(folder):  # False for names that no file can have, too
        return Path(folder)
    package, colon, inside = place.partition(":")
    if not colon or inside.startswith(("/", "\\")) or not all(map(str.isidentifier, package.split("."))):
        return None
    try:
        root = importlib.resources.files(package)
    except (ModuleNotFoundError, TypeError):  # the latter for a module that is no package
        raise InputError(f"{key}: {place!r}: no folder, and no package {package!r} is installed") from None
    except Exception as error:  # whatever a package's own code raises
        reason = first_line(error)
        raise InputError(f"{key}: {place!r}: package {package!r} cannot be imported: {reason}") from error
    found = Path(str(root.joinpath(inside)))
    if os.path.isdir(found):
        return found
    beside = []
    if os.path.isdir(found.parent):
        beside = [child.name for child in found.parent.iterdir() if child.is_dir()]
    hint = nearest(found.name, beside)
    raise InputError(f"{key}: {place!r}: the package has no folder {inside!r}{hint}")


def empty_places(table: str, values: Mapping[str, Any]) -> list[str]:
    """Finds keys of a table that should name a place and name none.

    Args:
        table: The table's name, for messages.
        values: Its keys and values.

    Returns:
        A sentence for each.
    """
    return [
        f"{table}.{key}: {_NEVER_EMPTY[key]}, found {value!r}"
        for key, value in values.items()
        if key in _NEVER_EMPTY and isinstance(value, str) and not value.strip()
    ]


def anchored(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes a recipe's relative folders absolute, so that they stay its own wherever it is extended.

    Args:
        tables: The recipe's tables.
        folder: Where its file lies.

    Returns:
        The tables, with every relative folder that exists made absolute.
    """

    def placed(key: str, value: Any) -> Any:
        if key in _KEYS and isinstance(value, str) and value.strip() and os.path.isdir(folder / value):
            return str(folder / value)
        return value

    return {
        table: {key: placed(key, value) for key, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for table, values in tables.items()
    }
