"""The whole state of a run, to resume it exactly: written beside its place and renamed.

    checkpoints/step-00000400/
        weights.safetensors    what is trained
        average.safetensors    its running average, if there is one
        optimizer.safetensors  what the optimizer remembers of each weight
        state.json             the step, and all that is a number
        SHA256SUMS             of these files, written last

Draws and the place in the data are functions of the step, so the step says them.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from treeflash.checkpoints.writing import write_tensors
from treeflash.errors import CheckpointError, InputError
from treeflash.json_files import read_json
from treeflash.training.checksums import SUMS, check_sum, digest_of, read_sums, write_sums
from treeflash.training.folders import write_folder

_NAME = re.compile(r"step-(?P<step>\d{8,})")
_TENSORS = ("weights", "average", "optimizer")
_STATE = "state.json"


@attrs.frozen(eq=False)
class Snapshot:
    """A run between two steps.

    Attributes:
        step: Steps done.
        weights: By name.
        average: By name; empty without one.
        optimizer: What the optimizer keeps of the weights, by name.
        numbers: All that is a number, the step included, as JSON takes it.
    """

    step: int
    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    numbers: Mapping[str, Any]


@attrs.frozen
class Snapshots:
    """The snapshots of a run.

    Attributes:
        folder: Where they are.
        keep: How many are kept, the last ones.
    """

    folder: Path
    keep: int

    @classmethod
    def of_run(cls, out: Path, keep: int = 1) -> Self:
        """Those of a run's folder."""
        return cls(out / "checkpoints", keep)

    def last_step(self) -> int:
        """Steps done when the last one was written; 0 without one."""
        last = self.last()
        return 0 if last is None else _step(last)

    def write(self, snapshot: Snapshot) -> Path:
        """Writes a snapshot, then drops those that are not kept.

        Args:
            snapshot: What to write.

        Returns:
            Its folder.

        Raises:
            InputError: When the disk does not take it; earlier ones are left.
        """

        def fill(folder: Path) -> None:
            for name in _TENSORS:
                tensors = getattr(snapshot, name)
                if tensors:
                    write_tensors(tensors, folder / f"{name}.safetensors")
            numbers = json.dumps({**snapshot.numbers, "step": snapshot.step}, indent=1)
            (folder / _STATE).write_text(numbers + "\n", encoding="utf-8")
            write_sums(folder, {path.name: digest_of(path) for path in sorted(folder.iterdir())})

        path = self.folder / f"step-{snapshot.step:08d}"
        write_folder(path, fill)
        self.prune()
        return path

    def prune(self) -> None:
        """Drops the snapshots that are not kept."""
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def last(self) -> Path | None:
        """Folder of the last snapshot; None when there is none."""
        found = self._all()
        return found[-1] if found else None

    def read(self, path: Path) -> Snapshot:
        """Reads a snapshot.

        Args:
            path: Its folder.

        Returns:
            What was written.

        Raises:
            CheckpointError: When it cannot be read.
        """
        try:
            sums = read_sums(path)
            if _STATE not in sums:
                raise InputError(f"{SUMS} lists no {_STATE}")
            for name, digest in sums.items():
                check_sum(path / name, digest)
            numbers = read_json(path / _STATE, InputError)
            if numbers.get("step") != _step(path):
                raise InputError(f"{_STATE}: expected an object with step = {_step(path)}")
            files = {name: path / f"{name}.safetensors" for name in _TENSORS}
            tensors = {name: load_file(file) if file.name in sums else {} for name, file in files.items()}
        except (InputError, OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); delete it to resume from the checkpoint before"
            ) from None
        return Snapshot(step=numbers["step"], numbers=numbers, **tensors)

    def _all(self) -> list[Path]:
        """All snapshots, by step; what else lies beside them is not looked at."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name) and path.is_dir()), key=_step)


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
