"""Whether weights are still what they were when something was made of them."""

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

# Bytes that one checksum is over: pieces of a weight are summed by several threads.
_PIECE = 1 << 22


class Seen:
    """Weights as they were, as far as can be told at no cost.

    A weight that is replaced, or changed in place, is noticed. A change through `weight.data` is not, nor one
    of a weight that was made in inference mode: torch counts neither. `checksums` tell these.

    Args:
        weights: The weights. Their memory is held, so that no other comes to lie where one of them lay.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        # `weight.data` may come to be other memory, which a view does not follow.
        self._held = [(weight, weight.detach()) for weight in weights]
        self._states = [_state(weight) for weight in weights]

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the weights, and still what they were."""
        return self._states == [_state(weight) for weight in weights]


def checksums(weights: Iterable[Tensor]) -> list[tuple[int, ...]]:
    """Reads all bytes of weights, in as many threads as torch uses.

    Args:
        weights: On the CPU; of others nothing is read.

    Returns:
        For each weight the CRC-32 of each 4 MB, which tell of any change but one in four billion.
    """
    pieces: list[memoryview] = []
    counts = []
    for weight in weights:
        data = memoryview(b"")
        if weight.device.type == "cpu":
            data = weight.detach().contiguous().view(-1).view(torch.uint8).numpy().data
        parts = [data[begin : begin + _PIECE] for begin in range(0, len(data), _PIECE)]
        pieces += parts
        counts.append(len(parts))
    threads = min(torch.get_num_threads(), len(pieces))
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            sums = iter(list(pool.map(zlib.crc32, pieces)))
    else:
        sums = map(zlib.crc32, pieces)
    return [tuple(next(sums) for _ in range(count)) for count in counts]


def _state(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies, and how often it was changed as far as that is counted."""
    try:
        return weight.data_ptr(), weight._version
    except RuntimeError:  # made in inference mode
        return weight.data_ptr(), 0
