"""The answers of a data directory as arrays, memory-mapped: made once, from the JSON lines."""

import hashlib
from array import array
from functools import cached_property
from pathlib import Path
from typing import Self

import attrs
import numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from treeflash.checkpoints.writing import write_tensors
from treeflash.files import partial_path
from treeflash.training.answers import AnswerStore, Split

TOKENS = "tokens.safetensors"
# Of the metadata, which the library writes in any order: one key.
_SUMS = "sha256"


@attrs.frozen(eq=False)
class TokenFile:
    """All answers of a data directory, in the order of `AnswerStore.rows`.

    Attributes:
        token_ids: int32 `[n]`: prompt and answer of each, one after the other.
        bounds: int64 `[r, 3]`: where each begins, where its answer begins, and where that ends.
        keys: int64 `[r]`: the 64 bits of each prompt's key.
        turns: int32 `[r]`: which turn is answered.
        heldout: bool `[r]`: whether it is held out.
    """

    token_ids: Tensor
    bounds: Tensor
    keys: Tensor
    turns: Tensor
    heldout: Tensor

    @classmethod
    def open(cls, store: AnswerStore) -> Self:
        """Opens the file, or makes it when it is missing or was made from other answers.

        Where the directory takes no file, the arrays are kept in memory.

        Args:
            store: The data directory.

        Returns:
            The arrays.

        Raises:
            InputError: When the answers are not what was written.
        """
        path, source = store.folder / TOKENS, _source(store)
        found = cls._read(path, source)
        if found is not None:
            return found
        made = cls._of(store)
        partial = partial_path(path)
        try:
            write_tensors(attrs.asdict(made), partial, {_SUMS: f"{source} {made._digest()}"})
            partial.replace(path)
        except (OSError, SafetensorError):
            return made
        finally:
            _remove(partial)
        return cls._read(path, source) or made

    def __len__(self) -> int:
        return len(self.bounds)

    def rows(self, split: Split | None) -> NDArray[numpy.int64]:
        """Numbers of the answers of a part.

        Args:
            split: Which; all when None.
        """
        if split is None:
            return numpy.arange(len(self))
        return numpy.flatnonzero(self.heldout.numpy() == (split == "heldout"))

    @cached_property
    def answer_lengths(self) -> NDArray[numpy.int64]:
        """int64 `[r]`: tokens of each answer."""
        bounds = self.bounds.numpy()
        lengths: NDArray[numpy.int64] = bounds[:, 2] - bounds[:, 1]
        return lengths

    def key(self, row: int) -> int:
        """The key of an answer's prompt, as a number.

        Args:
            row: Number of the answer.
        """
        return int(self.keys[row]) % 2**64

    @classmethod
    def _read(cls, path: Path, source: str) -> Self | None:
        """Reads the file if it is whole and was made from these answers."""
        try:
            with safe_open(path, framework="pt") as file:
                told = (file.metadata() or {}).get(_SUMS, "")
                if not told.startswith(source):
                    return None
                found = cls(**{field.name: file.get_tensor(field.name) for field in attrs.fields(cls)})
        except (OSError, SafetensorError):
            return None
        return found if told == f"{source} {found._digest()}" else None

    @classmethod
    def _of(cls, store: AnswerStore) -> Self:
        ids, bounds, keys, turns, heldout = array("i"), array("q"), array("Q"), array("i"), array("b")
        for row in store.rows():
            begin = len(ids)
            ids.extend(row.prompt_ids)
            ids.extend(row.answer_ids)
            bounds.extend((begin, begin + len(row.prompt_ids), len(ids)))
            keys.append(int(row.key, 16))
            turns.append(row.turn)
            heldout.append(row.split == "heldout")
        return cls(
            token_ids=_tensor(ids, numpy.int32),
            bounds=_tensor(bounds, numpy.int64).view(-1, 3),
            keys=_tensor(keys, numpy.int64),
            turns=_tensor(turns, numpy.int32),
            heldout=_tensor(heldout, numpy.bool_),
        )

    def _digest(self) -> str:
        found = hashlib.sha256()
        for field in attrs.fields(type(self)):
            tensor: Tensor = getattr(self, field.name)
            found.update(f"{field.name} {list(tensor.shape)} {tensor.dtype}\n".encode())
            found.update(tensor.numpy().data)
        return found.hexdigest()


def _source(store: AnswerStore) -> str:
    """What the arrays are made from: the sums of the answers, and signs that a file was touched since."""
    found = hashlib.sha256()
    for path, digest in store.files().items():
        told = path.stat()
        found.update(f"{path.name} {digest} {told.st_size} {told.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _tensor(values: "array[int]", dtype: type[numpy.generic]) -> Tensor:
    return torch.from_numpy(numpy.array(values).view(dtype))


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # of a folder that takes no file
        pass
