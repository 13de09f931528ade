"""What is written down of a run as it goes: JSON lines, and event files when asked."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from treeflash.errors import InputError
from treeflash.files import write_atomically
from treeflash.json_files import located_json
from treeflash.text_files import decoded

METRICS = "metrics.jsonl"


@attrs.frozen
class Mark:
    """A place in the record of a run, and what stands before it.

    Attributes:
        bytes: How many stand before it.
        sha256: Their sum.
    """

    bytes: int = 0
    sha256: str = hashlib.sha256().hexdigest()


class Metrics:
    """The record of a run: a line for each step, and one for each measurement.

    A step's line has `step`, `loss`, `lr`, `grad_norm`, `positions` and `seconds`; a measurement's has `step`
    and `heldout`, a summary for each distribution.

    Args:
        folder: Of the run.
        step: Steps done when it is opened.
        mark: Where the record stood then; what an earlier run wrote beyond it is dropped.
        tensorboard: Write event files too.
        say: Called with a sentence when the record is gone.

    Raises:
        InputError: When the record up to the mark is not what was written.
    """

    def __init__(
        self,
        folder: Path,
        step: int,
        mark: Mark,
        *,
        tensorboard: bool,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.path = folder / METRICS
        kept = b""
        if mark.bytes and not self.path.exists():
            say(f"{self.path} is gone: the record begins after step {step}")
        elif mark.bytes:
            kept = _kept(self.path, mark)
        write_atomically(self.path, kept.decode("utf-8"))
        self._sum, self._bytes = hashlib.sha256(kept), len(kept)
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # only when asked

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the event files."""
        if self._events is not None:
            self._events.close()

    def add(self, line: Mapping[str, Any]) -> None:
        """Writes a line."""
        data = (json.dumps(line) + "\n").encode()
        try:
            with self.path.open("ab") as file:
                file.write(data)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None
        self._sum.update(data)
        self._bytes += len(data)
        if self._events is not None:
            for name, value in _scalars(line):
                self._events.add_scalar(name, value, line["step"])

    def mark(self) -> Mark:
        """Where the record stands. What stands before is on the disk."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        return Mark(self._bytes, self._sum.hexdigest())


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the record of a run.

    Args:
        folder: Of the run.

    Returns:
        Its lines; a last one that a kill cut short is left out.

    Raises:
        InputError: When a line is none of a record.
    """
    path = folder / METRICS
    lines = []
    *whole, _ = decoded(path.read_bytes(), path).split("\n") if path.is_file() else [""]
    for number, text in enumerate(whole, start=1):
        where = f"{path}: line {number}"
        line = located_json(text, where)
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            raise InputError(f"{where}: expected an object with a step, found {text[:80]}")
        lines.append(line)
    return lines


def _kept(path: Path, mark: Mark) -> bytes:
    """What stands before a mark."""
    try:
        kept = path.read_bytes()[: mark.bytes]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(kept).hexdigest() != mark.sha256:
        raise InputError(
            f"{path}: its first {mark.bytes} bytes are not what the last checkpoint was written after; "
            "delete the file to continue without the record of earlier steps"
        )
    return kept


def _scalars(line: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in line.items():
        if isinstance(value, Mapping):
            found += _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            found += [(f"{prefix}{key}/{depth}", item) for depth, item in enumerate(value, start=1)]
        elif key != "step":
            found.append((f"{prefix}{key}", float(value)))
    return found
