"""Files that are written whole or not at all, and the cache folder."""

import os
import re
from pathlib import Path

import platformdirs

from treeflash.errors import InputError

# Name, process id and ending of what is being written beside its place.
_PARTIAL = re.compile(r"\..+\.\d+\.partial")


def partial_path(path: Path) -> Path:
    """Where a file or folder is written before it is renamed to its place.

    Args:
        path: Its place.

    Returns:
        A hidden name beside it, of this process alone.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.partial")


def is_partial(path: Path) -> bool:
    """Whether a path is one that `partial_path` makes.

    Args:
        path: The path.
    """
    return _PARTIAL.fullmatch(path.name) is not None


def write_atomically(path: Path, text: str) -> None:
    """Writes a file beside its place and renames it.

    Args:
        path: Where it goes.
        text: What it holds.

    Raises:
        InputError: When the disk does not take it; nothing is left half-written.
    """
    partial = partial_path(path)
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


def follow_umask(folder: Path) -> None:
    """Gives files the permissions that new files have; some libraries make theirs private.

    Args:
        folder: A folder that this process made, with the files.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


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
