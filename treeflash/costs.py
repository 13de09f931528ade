"""What a pass of the target over a tree costs, by the size of the tree and the length of the text."""

import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import attrs
import torch

from treeflash.errors import InputError
from treeflash.files import cache_folder, write_atomically
from treeflash.hardware import hardware
from treeflash.json_files import parse_json
from treeflash.target_interface import Target
from treeflash.tree import TokenTree

# Rows of the trees that are timed; costs lie on straight lines between them. Where nodes are dear most trees
# are small, and products grow in steps: on one CPU five rows took as long as two, and seven a fifth more.
_SIZES = (1, 2, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256)
# Texts before them.
_LENGTHS = (64, 1024)
_REPEATS = 4
# A pass over more rows takes no less time than this share of one over fewer, on a quiet machine.
_LEAST_SHARE = 0.8


@attrs.frozen
class PassCosts:
    """Times of passes, measured on a grid.

    Attributes:
        sizes: Rows of a pass, ascending: the root and the nodes of its tree.
        lengths: Positions cached before it, ascending.
        seconds: By length, then by size.
    """

    sizes: Sequence[int]
    lengths: Sequence[int]
    seconds: Sequence[Sequence[float]]

    @classmethod
    def of_target(cls, target: Target, most: int, *, refresh: bool = False) -> Self:
        """Measures a target, once: what was found is kept on disk for this model on this hardware.

        Args:
            target: The target.
            most: Rows of the largest pass wanted.
            refresh: Measure again.

        Returns:
            Its costs.
        """
        sizes = [size for size in _SIZES if size < most] + [most]
        limit = (target.max_positions or 1 << 30) - most
        lengths = sorted({max(1, min(length, limit)) for length in _LENGTHS})
        told = {"sizes": sizes, "lengths": lengths, **_conditions(target)}
        name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
        path = cache_folder() / "costs" / f"{name}.json"
        found = None if refresh else _kept(path, told)
        if found is None:
            found = [_measure(target, length, sizes) for length in lengths]
            failed = getattr(getattr(target, "compiled", None), "failed", False)
            # What a machine did that was busy with something else is not kept.
            if not failed and all(map(_rises, found)):
                _keep(path, {"of": told, "seconds": found})
        return cls(sizes, lengths, found)

    def up_to(self, nodes: int, length: int) -> list[float]:
        """Seconds of passes over trees of 0 to `nodes` nodes.

        Args:
            nodes: Nodes of the largest tree, without the root.
            length: Positions cached.

        Returns:
            `nodes + 1` numbers, never falling: a larger tree takes no less time, whatever was measured.
        """
        left, right, share = _place(self.lengths, length)
        by_length = zip(self.seconds[left], self.seconds[right], strict=True)
        by_size = [_between(low, high, share) for low, high in by_length]
        beyond = (_place(self.sizes, rows) for rows in range(len(self._places) + 1, nodes + 2))
        places = [*self._places[: nodes + 1], *beyond]
        costs = [_between(by_size[left], by_size[right], share) for left, right, share in places]
        return list(accumulate(costs, max))

    @cached_property
    def _places(self) -> list[tuple[int, int, float]]:
        """Where passes of 1, 2, ... rows lie on the grid; the same in every step."""
        return [_place(self.sizes, rows) for rows in range(1, self.sizes[-1] + 1)]


def _place(places: Sequence[int], at: int) -> tuple[int, int, float]:
    """The two neighbours of a place, by index, and what share of the way between them it lies at."""
    if len(places) == 1:
        return 0, 0, 0.0
    right = min(max(bisect_right(places, at), 1), len(places) - 1)
    left = right - 1
    return left, right, (at - places[left]) / (places[right] - places[left])


def _between(low: float, high: float, share: float) -> float:
    """The value at a share of the way, or beyond its ends; never below half of either."""
    return max(low + share * (high - low), 0.5 * min(low, high))


@torch.inference_mode()
def _measure(target: Target, length: int, sizes: Sequence[int]) -> list[float]:
    """The least of a few passes for each size, in turn: whatever else the machine does only adds to it."""
    state = target.start(1, length + max(sizes) + 1, ())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (length,), generator=generator)
    target.prefill(state, ids[None].to(target.device))
    # Some branches, so that no node lies deep; siblings differ.
    width = min(16, target.vocab_size)
    tokens = [node % target.vocab_size for node in range(max(sizes))]
    parents = [-1, *(max(0, node - width) for node in range(1, max(sizes)))]
    trees = [TokenTree.from_lists(tokens[:size], parents[:size], device=target.device) for size in sizes]
    taken: list[list[float]] = [[] for _ in sizes]
    for _ in range(_REPEATS):
        for times, tree in zip(taken, trees, strict=True):
            begin = time.perf_counter()
            target.verify(state, tree).logits[0, -1, 0].item()
            times.append(time.perf_counter() - begin)
    return [min(times) for times in taken]


def _rises(seconds: Sequence[float]) -> bool:
    """Whether no larger tree took much less time than a smaller one."""
    most = accumulate(seconds, max)
    return all(taken >= _LEAST_SHARE * before for taken, before in zip(seconds, most, strict=True))


def _conditions(target: Target) -> dict[str, Any]:
    """What the time of a pass depends on."""
    digest = getattr(target, "digest", None)
    return {
        "model": digest() if digest is not None else repr(target.fingerprint()),
        "dtype": str(target.dtype),
        "lean": getattr(target, "lean", None) is not None,
        "compiled": getattr(target, "compiled", None) is not None,
        "attention": getattr(target, "attention", None),
        "treeflash": version("treeflash"),
        **hardware(target.device),
    }


def _kept(path: Path, told: dict[str, Any]) -> list[list[float]] | None:
    """What was measured before, if it is whole and of this."""
    try:
        kept = parse_json(path.read_text(encoding="utf-8"))
        seconds = [[float(value) for value in row] for row in kept["seconds"]]
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    right = kept.get("of") == told and [len(row) for row in seconds] == [len(told["sizes"])] * len(
        told["lengths"]
    )
    return seconds if right else None


def _keep(path: Path, found: dict[str, Any]) -> None:
    """Writes what was measured; where no cache can be written, it is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    except (OSError, InputError):
        return
