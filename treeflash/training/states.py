"""What the target makes of the texts: computed each time, or once and kept on disk.

Only the tapped states and the final normed ones are kept, never logits: those are made again, a few rows at a
time, from the normed states.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from treeflash.errors import InputError
from treeflash.packed_text import PackedText, ReadText
from treeflash.target import HuggingFaceTarget
from treeflash.training.corpus import Text, pack, passes
from treeflash.training.folders import flush

# Texts a file: few enough to begin again after a kill without much lost.
_SHARD = 32
# Tokens in a pass: enough for the matrix products, and attention over a row grows with its square.
_PASS = 512
# Room that is left on the disk, bytes.
_SPARE = 1 << 30


class States(Protocol):
    """Gives what the target makes of texts."""

    def read(self, numbers: Sequence[int], text: PackedText) -> ReadText:
        """Reads a row.

        Args:
            numbers: Which texts it is packed of, by their numbers in the corpus.
            text: The row.

        Returns:
            Its states, on the target's device.
        """
        ...


@attrs.frozen(eq=False)
class ComputedStates:
    """Lets the target read every row anew.

    Attributes:
        target: The target.
        tap_layers: Layers whose outputs are wanted.
    """

    target: HuggingFaceTarget
    tap_layers: tuple[int, ...]

    def read(self, numbers: Sequence[int], text: PackedText) -> ReadText:
        """Runs the target over the row."""
        layers = (*self.tap_layers, self.target.num_layers - 1)
        states = self.target.read(text.token_ids, text.positions, text.causal_visibility(), layers)
        width = self.target.hidden_size
        return ReadText(text, states[:, :-width], states[:, -width:])


@attrs.frozen(eq=False)
class CachedStates:
    """Reads states from safetensors files, memory-mapped, which `fill` writes once.

    Attributes:
        computed: What computes them.
        folder: Where the files are.
        texts: All texts of the corpus.
    """

    computed: ComputedStates
    folder: Path
    texts: Sequence[Text]
    _files: dict[int, Any] = attrs.field(factory=dict, init=False)

    def size(self) -> int:
        """Bytes that all states take."""
        target = self.computed.target
        width = (len(self.computed.tap_layers) + 1) * target.hidden_size
        return sum(text.length for text in self.texts) * width * target.dtype.itemsize

    def missing(self) -> list[int]:
        """Numbers of the files that are not there."""
        count = -(-len(self.texts) // _SHARD)
        return [number for number in range(count) if not self._path(number).is_file()]

    def check_room(self) -> None:
        """Makes sure that the disk holds what is missing.

        Raises:
            InputError: When it does not.
        """
        share = len(self.missing()) * _SHARD / max(1, len(self.texts))
        wanted = int(self.size() * min(1.0, share))
        place = self.folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if wanted + _SPARE > free:
            raise InputError(
                f"{self.folder}: the target's states need {wanted / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
                'free; expected room for them and 1 GB more, or data.states = "compute"'
            )

    def fill(self, process: int = 0, processes: int = 1) -> Iterator[int]:
        """Writes what is missing, file by file.

        Args:
            process: Number of this process; each has files of its own to write.
            processes: How many there are.

        Yields:
            Tokens read, after each file.

        Raises:
            InputError: When the disk does not take it.
        """
        mine = [number for number in self.missing() if number % processes == process]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{self.folder}: cannot be made ({error.strerror})") from None
        for number in mine:
            yield self._write(number)

    def read(self, numbers: Sequence[int], text: PackedText) -> ReadText:
        """Takes the texts' states from the files."""
        device = text.token_ids.device
        taps, normed = (
            torch.cat([self._tensor(number, kind) for number in numbers]).to(device)
            for kind in ("taps", "normed")
        )
        return ReadText(text, taps, normed)

    def _tensor(self, number: int, kind: str) -> Tensor:
        shard = number // _SHARD
        try:
            if shard not in self._files:
                self._files[shard] = safe_open(self._path(shard), framework="pt")
            found: Tensor = self._files[shard].get_tensor(f"{number}.{kind}")
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{self._path(shard)}: cannot be read ({error}); delete it and start again to have it "
                "made anew"
            ) from None
        return found

    def _write(self, shard: int) -> int:
        first = shard * _SHARD
        texts = self.texts[first : first + _SHARD]
        tensors: dict[str, Tensor] = {}
        for group in passes([text.length for text in texts], _PASS):
            row = pack([texts[index] for index in group], self.computed.target.device)
            read = self.computed.read((), row)
            for index, begin, end in zip(group, row.bounds, row.bounds[1:], strict=False):
                tensors[f"{first + index}.taps"] = read.taps[begin:end].cpu().contiguous()
                tensors[f"{first + index}.normed"] = read.normed[begin:end].cpu().contiguous()
        path = self._path(shard)
        # Others may be writing the same: several runs share a folder.
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            save_file(tensors, partial)
            flush(partial)
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise InputError(
                f"{path}: cannot be written ({error}); what was written before is whole"
            ) from None
        return sum(text.length for text in texts)

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"
