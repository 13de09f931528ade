"""SHA-256 sums of a folder's files, in the form that `sha256sum --check` reads."""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from treeflash.errors import InputError
from treeflash.files import write_atomically
from treeflash.text_files import read_text

SUMS = "SHA256SUMS"
_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>[^/\\\0]+)")


def digest_of(path: Path) -> str:
    """The SHA-256 sum of a file: 64 hexadecimal digits.

    Args:
        path: The file.

    Raises:
        InputError: When it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes the sums of some files of a folder.

    Args:
        folder: The folder.
        sums: By file name.

    Raises:
        InputError: When the disk does not take them.
    """
    write_atomically(folder / SUMS, "".join(_line(name, digest) for name, digest in sums.items()))


def append_sum(path: Path) -> None:
    """Adds the sum of a file to those of its folder.

    Args:
        path: The file.

    Raises:
        InputError: When it cannot be read, or the disk does not take the sum.
    """
    sums, digest = path.parent / SUMS, digest_of(path)
    try:
        with sums.open("a", encoding="utf-8") as file:
            file.write(_line(path.name, digest))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{sums}: cannot be written ({error.strerror})") from None


def read_sums(folder: Path) -> dict[str, str]:
    """Reads the sums of a folder's files.

    Args:
        folder: The folder.

    Returns:
        Sums by file name. A last line that was cut short is left out; without a file of sums there are none.

    Raises:
        InputError: When the file is broken.
    """
    path = folder / SUMS
    if not path.is_file():
        return {}
    *lines, _ = read_text(path).split("\n")
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        told = _LINE.fullmatch(line)
        if told is None:
            raise InputError(f"{path}: line {number}: expected a SHA-256 sum and a file name, found {line!r}")
        found[told["name"]] = told["digest"]
    return found


def check_sum(path: Path, expected: str) -> None:
    """Makes sure that a file holds what was written.

    Args:
        path: The file.
        expected: Its sum.

    Raises:
        InputError: When it does not, or cannot be read.
    """
    found = digest_of(path)
    if found != expected:
        raise InputError(
            f"{path}: not what was written: expected SHA-256 {expected[:16]}..., found {found[:16]}..."
        )


def _line(name: str, digest: str) -> str:
    return f"{digest}  {name}\n"
