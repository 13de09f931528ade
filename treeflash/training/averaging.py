"""A running average of weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class WeightAverage:
    """Keeps `decay * average + (1 - decay) * weight` of every weight.

    Args:
        weights: The weights.
        decay: 0 keeps the weights as they are, and costs nothing.
    """

    def __init__(self, weights: Sequence[Tensor], decay: float) -> None:
        self.weights, self.decay = weights, decay
        self.values = [weight.detach().clone() for weight in weights] if decay else []

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes in the weights after a step, counted from 0; the first ones count less long."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for value, weight in zip(self.values, self.weights, strict=False):
            value.lerp_(weight, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the averages in the weights' place for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for value, weight in zip(self.values, self.weights, strict=False):
            kept = weight.clone()
            weight.copy_(value)
            value.copy_(kept)
