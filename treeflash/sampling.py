"""How tokens are chosen: the same way with and without speculation."""

from numbers import Integral, Real

import attrs
import numpy as np
import torch
from attrs.validators import deep_iterable
from torch import Tensor

from treeflash.errors import InputError
from treeflash.ranges import MAX_SEED


def _finite(instance: object, attribute: "attrs.Attribute[float]", value: float) -> None:
    if not isinstance(value, Real) or not 0 <= value < float("inf"):
        raise InputError(f"{attribute.name} must be a finite number >= 0, found {value!r}")


def _word(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if not isinstance(value, Integral) or not 0 <= value <= MAX_SEED:
        raise InputError(f"{attribute.name} must be an integer in 0..2**64-1, found {value!r}")


@attrs.define(eq=False)
class Draws:
    """Chooses tokens for one batch of sequences, greedily or by temperature sampling.

    A sampled token is the argmax of `logits + temperature * noise`, with Gumbel noise that is a
    function of (seed, sequence, position) alone. All nodes of a tree at one depth stand for the same
    position and share its noise. The text is therefore the same whatever was drafted, and a rounding
    error in the logits changes a token no oftener than it changes a probability. The noise is drawn
    on the CPU, so that it does not depend on the device either.

    Source: the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, "A* Sampling").

    Attributes:
        temperature: 0 is greedy.
        seed: From 0 to `MAX_SEED`.
        sequences: Number of each row's sequence, `B` of them.
    """

    temperature: float = attrs.field(default=0.0, validator=_finite)
    seed: int = attrs.field(default=0, validator=_word)
    sequences: tuple[int, ...] = attrs.field(default=(0,), validator=deep_iterable(_word))
    _noise: dict[tuple[int, int], Tensor] = attrs.field(factory=dict, init=False, repr=False)

    def choose(self, logits: Tensor, lengths: Tensor, depths: Tensor, max_depth: int) -> Tensor:
        """Chooses the token that follows each node.

        Args:
            logits: `[B, N, V]`, the target's.
            lengths: int64 `[B]` on the CPU: the position of each row's root.
            depths: int64 `[B, N]`: each node's depth below the root.
            max_depth: An upper bound of `depths`.

        Returns:
            int64 `[B, N]`.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        scores = logits.to(_exact(logits.dtype), copy=True)
        for row, (sequence, length) in enumerate(zip(self.sequences, lengths.tolist(), strict=True)):
            # The node at position p is followed by the token at position p + 1.
            levels = [self._noise_at(sequence, length + depth + 1, scores) for depth in range(max_depth + 1)]
            noise = torch.stack(levels) * self.temperature
            scores[row] += noise[depths[row].clamp(0, max_depth)]  # an empty slot may hold any depth
            for spent in [key for key in self._noise if key[0] == sequence and key[1] <= length]:
                del self._noise[spent]
        return scores.argmax(dim=-1)

    def choose_one(self, logits: Tensor, position: int, row: int = 0) -> int:
        """Chooses the token that follows one node, as `choose` does.

        Args:
            logits: `[V]`, the target's.
            position: The node's.
            row: Whose node it is.

        Returns:
            The token id.
        """
        chosen = logits if self.temperature == 0 else self.scores(logits, position, row)
        return int(chosen.argmax())

    def scores(self, logits: Tensor, position: int, row: int = 0) -> Tensor:
        """What the token that follows a node is the argmax of.

        Args:
            logits: `[V]`, the target's.
            position: The node's.
            row: Whose node it is.

        Returns:
            `[V]`, float32 or float64.
        """
        exact = logits.to(_exact(logits.dtype))
        if self.temperature == 0:
            return exact
        return exact + self.temperature * self._draw(self.sequences[row], position + 1, exact)

    def _noise_at(self, sequence: int, position: int, like: Tensor) -> Tensor:
        """The noise of a position, kept: the nodes at one depth share it."""
        key = (sequence, position)
        if key not in self._noise:
            self._noise[key] = self._draw(sequence, position, like)
        return self._noise[key]

    def _draw(self, sequence: int, position: int, like: Tensor) -> Tensor:
        """Gumbel noise `[V]` of one position, drawn in float64, in the dtype of `like`."""
        # A counter-based generator: the position is the counter, nothing is carried along. In an array, since
        # a list of words above and below 2**63 would become floating-point numbers.
        key = np.array([self.seed, sequence], dtype=np.uint64)
        bits = np.random.Philox(key=key, counter=[0, 0, 0, position])
        race = np.random.Generator(bits).standard_exponential(like.shape[-1])
        return torch.from_numpy(-np.log(race)).to(like.dtype).to(like.device)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """What scores are added up in."""
    return dtype if dtype == torch.float64 else torch.float32
