"""What the target makes of the texts: computed each time, or once and kept on disk.

Only the tapped states and the final normed ones are kept, never logits: those are made again, a few rows at a
time, from the normed states.
"""

import json
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treeflash.checkpoints.writing import write_tensors
from treeflash.errors import InputError, first_line
from treeflash.files import partial_path
from treeflash.json_files import parse_json
from treeflash.packed_text import PackedText, ReadText
from treeflash.target import HuggingFaceTarget
from treeflash.training.folders import make_folder
from treeflash.training.texts import Texts, pack, passes

# Texts a file: few enough to begin again after a kill without much lost.
_SHARD = 32
# Tokens in a pass: enough for the matrix products, and attention over a row grows with its square.
_PASS = 512
# Of the metadata, which the library writes in any order: one key.
_SUMS = "crc32"
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
    texts: Texts
    _files: dict[int, Any] = attrs.field(factory=dict, init=False)
    _opened: ExitStack = attrs.field(factory=ExitStack, init=False)
    # What is read again and again is compared with its sum once.
    _checked: set[str] = attrs.field(factory=set, init=False)

    def close(self) -> None:
        """Closes the files; they are opened again when they are read."""
        self._files.clear()
        self._opened.close()

    def size(self) -> int:
        """Bytes that all states take."""
        target = self.computed.target
        width = (len(self.computed.tap_layers) + 1) * target.hidden_size
        return int(self.texts.lengths.sum()) * width * target.dtype.itemsize

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
        make_folder(self.folder)
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
        shard, fault = number // _SHARD, ""
        target = self.computed.target
        layers = len(self.computed.tap_layers) if kind == "taps" else 1
        shape = (self.texts[number].length, layers * target.hidden_size)
        try:
            if shard not in self._files:
                opened = safe_open(self._path(shard), framework="pt")
                self._files[shard] = self._opened.enter_context(opened)
            name, file = f"{number}.{kind}", self._files[shard]
            found: Tensor = file.get_tensor(name)
            if (found.shape, found.dtype) != (shape, target.dtype):
                fault = (
                    f"{name}: expected {target.dtype} {list(shape)}, found {found.dtype} {list(found.shape)}"
                )
            elif name not in self._checked:
                told = parse_json((file.metadata() or {}).get(_SUMS, "{}"))
                if told.get(name) != _sum(found):
                    fault = f"{name}: not what was written"
                self._checked.add(name)
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            fault = first_line(error)
        if fault:
            raise InputError(
                f"{self._path(shard)}: cannot be read ({fault}); delete it and start again to have it "
                "made anew"
            )
        return found

    def _write(self, shard: int) -> int:
        first = shard * _SHARD
        texts = self.texts[first : first + _SHARD]
        tensors: dict[str, Tensor] = {}
        for group in passes(texts.lengths.tolist(), _PASS):
            row = pack([texts[index] for index in group], self.computed.target.device)
            read = self.computed.read((), row)
            for index, begin, end in zip(group, row.bounds, row.bounds[1:], strict=False):
                tensors[f"{first + index}.taps"] = read.taps[begin:end].cpu()
                tensors[f"{first + index}.normed"] = read.normed[begin:end].cpu()
        path = self._path(shard)
        partial = partial_path(path)
        try:
            write_tensors(
                tensors, partial, {_SUMS: json.dumps({name: _sum(tensors[name]) for name in tensors})}
            )
            partial.replace(path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise InputError(
                f"{path}: cannot be written ({error}); what was written before is whole"
            ) from None
        return int(texts.lengths.sum())

    def _path(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05d}.safetensors"


def _sum(tensor: Tensor) -> str:
    return f"{zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data):08x}"
