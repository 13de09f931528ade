"""The target's own passes, timed apart from what verification does around them."""

import time
from typing import Any

import torch

from treeflash.target import HuggingFaceTarget


class TimedPasses:
    """A target whose passes over trees are timed while `times` is a list.

    Args:
        target: What it stands for.
    """

    def __init__(self, target: HuggingFaceTarget) -> None:
        self._target = target
        self.times: list[float] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def verify(self, state: Any, tree: Any) -> Any:
        """Reads a tree."""
        if self.times is None:
            return self._target.verify(state, tree)
        begin = now(self._target.device)
        output = self._target.verify(state, tree)
        self.times.append(now(self._target.device) - begin)
        return output


def now(device: torch.device) -> float:
    """The time at which the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
