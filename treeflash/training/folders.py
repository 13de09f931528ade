"""Folders that long runs write: begun once, resumed with the same settings only, never half-written."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from treeflash.errors import InputError, bullet_list
from treeflash.files import partial_path, write_atomically
from treeflash.json_files import read_json

# What was at a place while something else is put there.
BEFORE = re.compile(r"\.(?P<name>.+)\.before")
# Differences that are listed.
_SHOWN = 12


def flush(path: Path) -> None:
    """Makes sure that a file is on the disk, not on its way there."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_folder(path: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder beside its place and renames it, in place of one that is there.

    Args:
        path: Where it goes.
        fill: Writes its files into an empty folder.

    Raises:
        InputError: When the disk does not take it; what was there is left.
    """
    partial = partial_path(path)
    before = path.with_name(f".{path.name}.before")
    try:
        for rest in (partial, before):
            shutil.rmtree(rest, ignore_errors=True)
        partial.mkdir(parents=True)
        fill(partial)
        for file in partial.iterdir():
            flush(file)
        if path.exists():
            path.rename(before)
        partial.rename(path)
        shutil.rmtree(before, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be written ({error}); what was written before is whole") from None
    finally:
        if before.exists() and not path.exists():
            before.rename(path)
        shutil.rmtree(partial, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Makes a folder if it is not there.

    Args:
        folder: The folder.

    Raises:
        InputError: When it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror})") from None


def begin(folder: Path, name: str, manifest: Mapping[str, Any], free: Set[str] = frozenset()) -> None:
    """Begins a folder, or makes sure that one begun before was begun alike.

    Args:
        folder: The folder.
        name: Of the file in it that says what it was begun with.
        manifest: What it is begun with.
        free: Keys that may differ, dotted.

    Raises:
        InputError: When it was begun with other settings, or cannot be written.
    """
    path = folder / name
    if os.path.isfile(path):  # False for a name that no file can have, too
        before, now = flat(read_manifest(folder, name, "a folder of this kind")), flat(manifest)
        refuse_changes(folder, *({key: of[key] for key in of.keys() - free} for of in (before, now)))
        return
    make_folder(folder)
    write_atomically(path, json.dumps(manifest, indent=1) + "\n")


def refuse_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Makes sure that a folder is gone on with as it was begun.

    Args:
        folder: The folder.
        before: What it was begun with, by dotted key.
        now: What it is to go on with.

    Raises:
        InputError: When they differ.
    """
    faults = [
        f"{key}: expected {before.get(key)!r} as before, found {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
    ]
    if faults:
        headline = f"{folder} was begun with other settings (deleted, or in another place, it begins anew)"
        raise InputError(bullet_list(headline, faults, _SHOWN))


def read_manifest(folder: Path, name: str, expected: str) -> dict[str, Any]:
    """Reads what a folder was begun with.

    Args:
        folder: The folder.
        name: Of the file.
        expected: What the folder should be, for the message.

    Raises:
        InputError: When there is no such file, or it is broken.
    """
    path = folder / name
    if not path.is_file():
        raise InputError(f"{folder}: expected {expected}, found no {name}")
    return read_json(path, InputError)


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Writes nested tables as one, with dotted keys.

    Args:
        tables: The tables.
        prefix: Of every key.

    Returns:
        A value for each key; tuples are lists, as JSON has them.
    """
    found: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return found
