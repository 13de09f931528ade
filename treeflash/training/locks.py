"""One run a folder: the second is refused, and what a killed one left is removed."""

import json
import os
import shutil
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from filelock import lock_descriptor, unlock_descriptor

from treeflash.errors import InputError
from treeflash.files import is_partial
from treeflash.json_files import parse_json
from treeflash.training.folders import BEFORE, make_folder

LOCK = ".treeflash.lock"
# How often, and how long, to wait for a holder that has the lock and is about to write down who it is.
_LOOKS, _PAUSE = 20, 0.05


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds a folder, so that no other process writes to it.

    The operating system lets go of the lock when the process ends, however it ends. A folder that was made
    for this and stayed empty is removed.

    Args:
        folder: The folder; made if it is not there.

    Yields:
        Nothing, once leftovers of killed processes are removed.

    Raises:
        InputError: When another process holds it; the message names the process. When it cannot be made.
    """
    made = not os.path.exists(folder)  # False for what no file system takes, too
    make_folder(folder)
    path = folder / LOCK
    file = _locked(path)
    try:
        remove_leftovers(folder)
        yield
    finally:
        _release(path, file)
        if made:
            _remove_if_empty(folder)


def remove_leftovers(folder: Path) -> None:
    """Removes what killed processes left half-written. The caller holds the folder.

    Args:
        folder: The folder; not those in it.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        place = BEFORE.fullmatch(path.name)
        if place is not None and not (folder / place["name"]).exists():
            path.rename(folder / place["name"])  # killed between two renames
        elif place is not None or is_partial(path):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _locked(path: Path) -> IO[bytes]:
    """Opens a lock file and locks it."""
    while True:
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be opened ({error.strerror})") from None
        try:
            mine = _try_lock(path, file)
            if mine and _is_at(path, file):
                _say_who(path, file)
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # or its holder has just removed it
        if not mine:
            raise InputError(
                f"{path.parent} is in use by {_holder(path)}; wait until that ends, or choose another folder"
            )


def _say_who(path: Path, file: IO[bytes]) -> None:
    """Writes who holds a lock, for the messages of others."""
    try:
        file.truncate(0)
        # Windows locks the first byte against readers.
        file.write(b"\n" + json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None


def _try_lock(path: Path, file: IO[bytes]) -> bool:
    try:
        return lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        warnings.warn(
            f"{path.parent}: this file system has no locks ({error.strerror}); make sure that no other "
            "process writes here",
            RuntimeWarning,
            stacklevel=4,
        )
        return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether a file that was opened is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(path: Path, file: IO[bytes]) -> None:
    try:
        path.unlink(missing_ok=True)  # while it is locked: whoever opened it before looks again
        unlock_descriptor(file.fileno())
    except OSError:  # Windows removes no file that is open, and some file systems have no locks
        pass
    finally:
        file.close()


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # it holds something
        pass


def _holder(path: Path) -> str:
    """Who holds a lock, for a message."""
    for _ in range(_LOOKS):
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(1)
                told = parse_json(file.read().decode())
            return f"process {told['pid']} on {told['host']}"
        except (OSError, ValueError, TypeError, KeyError):
            time.sleep(_PAUSE)
    return "another process"
