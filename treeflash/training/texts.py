"""Texts to train on: views into flat arrays of token ids, so that a corpus takes no memory of its own."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, overload

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeflash.packed_text import PackedText


def _ids(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.int32)


_FIELD: Any = {"converter": _ids, "eq": attrs.cmp_using(eq=torch.equal)}


@attrs.frozen
class Text:
    """A prompt and the target's answer.

    Attributes:
        prompt_ids: int32 `[p]`: token ids.
        answer_ids: int32 `[a]`: token ids.
    """

    prompt_ids: Tensor = attrs.field(**_FIELD)
    answer_ids: Tensor = attrs.field(**_FIELD)

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.answer_ids)


@attrs.frozen(eq=False)
class Texts(Sequence[Text]):
    """Some texts of some arrays of token ids.

    Attributes:
        arrays: int32 `[n]` each, memory-mapped or not.
        places: int64 `[t, 4]`: of each text, which array it lies in, where it begins, where its answer
            begins, and where that ends.
    """

    arrays: tuple[Tensor, ...]
    places: NDArray[numpy.int64]

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Text: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> Text | Self:
        if isinstance(index, slice):
            return attrs.evolve(self, places=self.places[index])
        array, begin, answer, end = self.places[index].tolist()
        ids = self.arrays[array]
        return Text(ids[begin:answer], ids[answer:end])

    def __iter__(self) -> Iterator[Text]:
        return (self[index] for index in range(len(self)))

    def __add__(self, other: Self) -> Self:
        """All texts of both; they lie in the same arrays.

        Args:
            other: The others.
        """
        return attrs.evolve(self, places=numpy.concatenate([self.places, other.places]))

    @property
    def lengths(self) -> NDArray[numpy.int64]:
        """int64 `[t]`: tokens of each text."""
        return self.places[:, 3] - self.places[:, 1]

    @property
    def answer_lengths(self) -> NDArray[numpy.int64]:
        """int64 `[t]`: tokens of each answer."""
        return self.places[:, 3] - self.places[:, 2]

    def token_counts(self, size: int) -> tuple[Tensor, Tensor]:
        """How often each token occurs in prompts and in answers.

        Args:
            size: Tokens there are.

        Returns:
            int64 `[size]` each.
        """
        counts = torch.zeros(2, size, dtype=torch.int64)
        for text in self:
            for count, ids in zip(counts, (text.prompt_ids, text.answer_ids), strict=True):
                count.index_add_(0, ids.long(), torch.ones(len(ids), dtype=torch.int64))
        return counts[0], counts[1]


def pack(texts: Iterable[Text], device: torch.device | str = "cpu") -> PackedText:
    """Puts texts side by side.

    Args:
        texts: The texts.
        device: Where the row goes.

    Returns:
        The row.
    """
    return PackedText.pack([(text.prompt_ids, text.answer_ids) for text in texts], device)


def passes(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Divides texts, in order, into passes of the target.

    Args:
        lengths: Tokens of each text.
        limit: Tokens in a pass at most.

    Returns:
        The numbers of the texts of each pass.
    """
    divided: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if not divided or length > room:
            divided.append([])
            room = limit
        divided[-1].append(number)
        room -= length
    return divided
