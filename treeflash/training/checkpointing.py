"""The whole state of a run, to go on with it exactly: written beside its place and renamed.

    checkpoints/step-00000400/
        weights.safetensors    what is trained
        average.safetensors    its running average, if there is one
        optimizer.safetensors  what the optimizer remembers of each weight
        state.json             the step, and all that is a number

Draws and the place in the data are functions of the step, so the step says them.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from treeflash.errors import CheckpointError
from treeflash.json_files import read_json
from treeflash.training.folders import write_folder

_PATTERN = "step-*"


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
        return 0 if last is None else int(last.name.rpartition("-")[2])

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
            for name in ("weights", "average", "optimizer"):
                tensors = {key: _storable(tensor) for key, tensor in getattr(snapshot, name).items()}
                if tensors:
                    save_file(tensors, folder / f"{name}.safetensors")
            (folder / "state.json").write_text(
                json.dumps(snapshot.numbers, indent=1) + "\n", encoding="utf-8"
            )

        path = self.folder / f"step-{snapshot.step:08d}"
        write_folder(path, fill)
        for old in self._all()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return path

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
            numbers = read_json(path / "state.json", CheckpointError)
            weights, average, optimizer = (
                load_file(file) if file.is_file() else {}
                for file in (path / f"{name}.safetensors" for name in ("weights", "average", "optimizer"))
            )
            return Snapshot(numbers["step"], weights, average, optimizer, numbers)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error}); delete it to go on from the snapshot before"
            ) from None

    def _all(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(_PATTERN) if path.is_dir())


def _storable(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
