"""Where models and checkpoints lie: in a folder, inside a package, or on the hub."""

import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeflash.errors import InputError, first_line, nearest

# Keys of a recipe that may hold a folder; a relative one is relative to the file that says so.
_KEYS = ("model", "checkpoint")


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
    if place.count("/") != 1 or place.startswith((".", "/")):
        raise InputError(
            f"{key}: expected a folder, package:path or hub name, found {place!r}, which is none"
        )
    from huggingface_hub import snapshot_download  # only for checkpoints that are not on disk

    try:
        return Path(snapshot_download(place, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise InputError(f"{key}: {place!r} is no folder and cannot be downloaded: {reason}") from error


def on_disk(place: str, key: str) -> Path | None:
    """Finds a folder, given as itself or as `package:path`.

    Args:
        place: The place.
        key: Where a recipe names it, for messages.

    Returns:
        The folder; None when there is none, and the place may be a hub name.

    Raises:
        InputError: When the package is not installed, or has no such folder.
    """
    package, colon, inside = place.partition(":")
    if colon and all(word.isidentifier() for word in package.split(".")):
        try:
            found = Path(str(importlib.resources.files(package) / inside))
        except (ModuleNotFoundError, TypeError):  # the latter for a module that is no package
            raise InputError(f"{key}: {place!r}: no package {package!r} is installed") from None
        if not found.is_dir():
            around = found.parent
            beside = (
                [folder.name for folder in around.iterdir() if folder.is_dir()] if around.is_dir() else []
            )
            hint = nearest(found.name, beside)
            raise InputError(f"{key}: {place!r}: the package has no folder {inside!r}{hint}")
        return found
    path = Path(place).expanduser()
    return path if path.is_dir() else None


def anchored(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes a recipe's relative folders absolute, so that they stay its own wherever it is extended.

    Args:
        tables: The recipe's tables.
        folder: Where its file lies.

    Returns:
        The tables, with every relative folder that exists made absolute.
    """

    def placed(key: str, value: Any) -> Any:
        if key in _KEYS and isinstance(value, str) and os.path.isdir(folder / value):
            return str(folder / value)
        return value

    return {
        table: {key: placed(key, value) for key, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for table, values in tables.items()
    }
