"""What a pass of the target over a tree costs, by the size of the tree and the length of the text."""

import hashlib
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
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
from treeflash.version import __version__

# Rows of the trees that are timed; costs lie on straight lines between them. Where nodes are dear most trees
# are small, and products grow in steps: on one CPU five rows took as long as two, and seven a fifth more.
_SIZES = (1, 2, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256)
# Texts before them.
_LENGTHS = (64, 1024)
_ROUNDS = 4
# Two times that are no further apart than this are the same, and need no third ...
_SAME = 1.05
# ... and those of a machine that does little else are no further apart than this.
_STEADY = 1.2
# A pass over more rows takes no less time than this share of one over fewer, on a quiet machine.
_LEAST_SHARE = 0.8
# Seconds that timing takes at most. Sizes are timed in ascending order: the dear ones are left out first.
_LIMIT = 20.0
# Of these, what reading a longer text may take.
_READING = 0.25
# Rows that have to be timed for costs to say anything of trees.
_FEWEST_ROWS = 8
# Seconds for which costs are used that were timed on a busy machine, or not to the end.
_PROVISIONAL = 3600.0

# Called with the number of passes timed and of all.
Progress = Callable[[int, int], None]


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
    def of_target(
        cls,
        target: Target,
        most: int,
        *,
        refresh: bool = False,
        progress: Progress = lambda done, total: None,
    ) -> Self | None:
        """Times a target's passes, once: what was found is kept on disk for this model on this hardware.

        On a machine that is busy, or too slow to time all sizes in 20 seconds, what was found is used for an
        hour, and timed again after that.

        Args:
            target: The target.
            most: Rows of the largest pass wanted.
            refresh: Measure again.
            progress: Called with passes timed and passes there are, before each.

        Returns:
            Its costs, up to `most` rows or as many as there was time for; None when not even small trees
            could be timed.
        """
        sizes = [size for size in _SIZES if size < most] + [most]
        limit = (target.max_positions or 1 << 30) - most
        lengths = sorted({max(1, min(length, limit)) for length in _LENGTHS})
        told = {"sizes": sizes, "lengths": lengths, **_conditions(target)}
        name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
        path = cache_folder() / "costs" / f"{name}.json"
        found = None if refresh else _kept(path, told)
        if found is None:
            timed = _time_passes(target, lengths, sizes, progress)
            count = len(timed.seconds[0])
            if count < len(sizes) and sizes[:count][-1:] < [_FEWEST_ROWS]:
                return None
            found = timed.seconds
            # What compiled passes cost is not what they cost where compiling failed.
            if not getattr(getattr(target, "compiled", None), "failed", False):
                settled = timed.steady and all(map(_rises, found))
                until = None if settled else time.time() + _PROVISIONAL
                _keep(path, {"of": told, "provisional_until": until, "seconds": found})
        return cls(sizes[: len(found[0])], lengths[: len(found)], found)

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


@attrs.frozen
class _Timed:
    """What timing came to.

    Attributes:
        seconds: By length, the least time of each size, as far as there was time for.
        steady: Whether there was time for all, and two times of each agree.
    """

    seconds: list[list[float]]
    steady: bool


@torch.inference_mode()
def _time_passes(target: Target, lengths: Sequence[int], sizes: Sequence[int], progress: Progress) -> _Timed:
    """Times each size after each length in turn, and takes the least: other work on the machine only adds.

    The first round goes by size, so that all lengths have the same sizes when time is up. Later ones leave
    out what two times agree on.
    """
    end, total, done = time.perf_counter() + _LIMIT, _ROUNDS * len(sizes) * len(lengths), 0
    progress(done, total)
    states, pace = [], 0.0
    for length in lengths:
        if pace * length < _READING * _LIMIT:
            begin = time.perf_counter()
            states.append(_read_text(target, length, max(sizes)))
            pace = (time.perf_counter() - begin) / length
    trees = [_tree(target, size) for size in sizes]
    taken: list[list[list[float]]] = [[[] for _ in sizes] for _ in states]
    for _ in range(_ROUNDS):
        for size, tree in enumerate(trees):
            if time.perf_counter() > end:
                break
            for length, state in enumerate(states):
                times = taken[length][size]
                if not _agree(times, _SAME):
                    progress(done, total)
                    begin = time.perf_counter()
                    target.verify(state, tree).logits[0, -1, 0].item()
                    times.append(time.perf_counter() - begin)
                done += 1
    progress(total, total)
    seconds = [[min(times) for times in row if times] for row in taken]
    steady = done == total and all(_agree(times, _STEADY) for row in taken for times in row)
    return _Timed(seconds, steady)


def _agree(times: Sequence[float], most: float) -> bool:
    """Whether the two least times are no further apart than some factor: that little else was going on."""
    least = sorted(times)[:2]
    return len(least) == 2 and least[1] <= most * least[0]


def _read_text(target: Target, length: int, most: int) -> Any:
    """A state in which the target has read a text of some length."""
    state = target.start(1, length + most + 1, ())
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (length,), generator=generator)
    target.prefill(state, ids[None].to(target.device))
    return state


def _tree(target: Target, size: int) -> TokenTree:
    """A tree with some branches, so that no node lies deep; siblings differ."""
    width = min(16, target.vocab_size)
    tokens = [node % target.vocab_size for node in range(size)]
    parents = [-1, *(max(0, node - width) for node in range(1, size))]
    return TokenTree.from_lists(tokens, parents, device=target.device)


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
        "treeflash": __version__,
        **hardware(target.device),
    }


def _kept(path: Path, told: dict[str, Any]) -> list[list[float]] | None:
    """What was timed before, if it is whole, of this, and not out of date."""
    try:
        kept = parse_json(path.read_text(encoding="utf-8"))
        seconds = [[float(value) for value in row] for row in kept["seconds"]]
        until = kept["provisional_until"]
        current = until is None or time.time() < float(until) <= time.time() + _PROVISIONAL
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    counts = {len(row) for row in seconds}
    fits = len(counts) == 1 and 0 < max(counts) <= len(told["sizes"]) and len(seconds) <= len(told["lengths"])
    return seconds if fits and current and kept.get("of") == told else None


def _keep(path: Path, found: dict[str, Any]) -> None:
    """Writes what was measured; where no cache can be written, it is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    except (OSError, InputError):
        return
