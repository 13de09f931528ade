"""What is written down of a run as it goes: JSON lines, and event files when asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treeflash.errors import InputError
from treeflash.files import write_atomically
from treeflash.json_files import parse_json

METRICS = "metrics.jsonl"


class Metrics:
    """The record of a run: a line for each step, and one for each measurement.

    A step's line has `step`, `loss`, `lr`, `grad_norm`, `positions` and `seconds`; a measurement's has `step`
    and `heldout`, a summary for each distribution.

    Args:
        folder: Of the run.
        step: Steps done when it is opened; what an earlier run wrote beyond them is dropped.
        tensorboard: Write event files too.
    """

    def __init__(self, folder: Path, step: int, *, tensorboard: bool) -> None:
        self.path = folder / METRICS
        kept = [line for line in read_metrics(folder) if step > 0 and line["step"] <= step]
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # only when asked

            self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def add(self, line: Mapping[str, Any]) -> None:
        """Writes a line."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written ({error.strerror})") from None
        if self._events is not None:
            for name, value in _scalars(line):
                self._events.add_scalar(name, value, line["step"])

    def close(self) -> None:
        """Ends the event files."""
        if self._events is not None:
            self._events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Reads the record of a run.

    Args:
        folder: Of the run.

    Returns:
        Its lines; a last one that a kill cut short is left out.
    """
    path = folder / METRICS
    lines = []
    written = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for text in written.splitlines():
        try:
            line = parse_json(text)
        except ValueError:
            break
        if not (isinstance(line, dict) and isinstance(line.get("step"), int)):
            break
        lines.append(line)
    return lines


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
