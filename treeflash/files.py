"""Files that are written whole or not at all, and where what can be made again is kept."""

import os
from pathlib import Path

import platformdirs

from treeflash.errors import InputError


def write_atomically(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it.

    Args:
        path: Where it goes.
        text: What it holds.

    Raises:
        InputError: When the disk does not take it; nothing is left half-written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); what was written before is whole"
        ) from None


def cache_folder() -> Path:
    """Where things are kept that can be made again.

    Returns:
        The folder that the environment variable `TREEFLASH_CACHE` names; otherwise `treeflash` in the user's
        cache folder. It may not be there yet.

    Raises:
        InputError: When the variable names the home of a user that there is not.
    """
    named = os.environ.get("TREEFLASH_CACHE")
    if named:
        try:
            return Path(named).expanduser().absolute()
        except RuntimeError:
            raise InputError(f"TREEFLASH_CACHE: expected a folder, found {named!r}: no such user") from None
    return platformdirs.user_cache_path("treeflash", appauthor=False)
