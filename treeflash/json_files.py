"""JSON that comes from outside."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from treeflash.errors import InputError, TreeflashError
from treeflash.text_files import read_text

# No file that is read here needs a tenth of it, and Python gives up at about a thousand.
_DEEPEST = 100


def parse_json(text: str) -> Any:
    """Parses JSON.

    Args:
        text: The JSON.

    Returns:
        What it says.

    Raises:
        ValueError: When it is not valid, or nested so deeply that it cannot be worked with.
    """
    too_deep = f"nested more than {_DEEPEST} levels deep"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("[") + text.count("{") > _DEEPEST:
        level: list[Any] = [value]
        for _ in range(_DEEPEST):
            level = [part for parent in level for part in _parts(parent)]
        if any(isinstance(part, dict | list) for part in level):
            raise ValueError(too_deep)
    return value


def located_json(text: str, place: object) -> Any:
    """Parses JSON.

    Args:
        text: The JSON.
        place: Where it is from, for messages.

    Returns:
        What it says.

    Raises:
        InputError: When it is not valid, or nested too deep.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputError(f"{place}: not valid JSON ({error})") from None


def read_json(path: Path, kind: type[TreeflashError]) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Args:
        path: The file.
        kind: The error to raise.

    Returns:
        The object.

    Raises:
        TreeflashError: Of that kind, when the file is missing or holds something else.
    """
    try:
        value = located_json(read_text(path), path)
    except InputError as error:
        raise kind(str(error)) from None
    if not isinstance(value, dict):
        raise kind(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _parts(value: Any) -> Iterable[Any]:
    """What stands one level down."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
