"""The target as the parts see it, whatever model is behind it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from treeflash.tree import TokenTree
from treeflash.types import TargetOutput


@attrs.frozen
class TargetFacts:
    """Sizes of a target that a drafter was made for.

    Attributes:
        hidden_size: D.
        num_layers: Decoder layers.
        vocab_size: Token ids that can be embedded and scored.
        rope_theta: Base of the rotary positions, None when the model has none.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    rope_theta: float | None


class Target(Protocol):
    """The model whose text is wanted, as the parts see it.

    Attributes:
        device: Where inputs go and outputs come from.
        dtype: Of hidden states and logits.
        vocab_size: Token ids it can embed.
        hidden_size: D.
        num_layers: Decoder layers.
        max_positions: Positions it was made for, or None when it names no limit.
        stop_ids: Tokens that end its texts.
    """

    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int | None
    stop_ids: tuple[int, ...]

    def check_taps(self, tap_layers: Sequence[int]) -> None:
        """Makes sure that the states of layers can be read.

        Args:
            tap_layers: Layers, as in `start`.

        Raises:
            InputError: When there is no such layer.
            UnsupportedTargetError: When its layers give no state per position.
        """
        ...

    def start(self, batch_size: int, capacity: int, tap_layers: Sequence[int]) -> Any:
        """Makes the state of new sequences.

        Args:
            batch_size: B.
            capacity: Cache rows a sequence may come to need, trees included: a bound that most texts stay
                far below.
            tap_layers: Layers whose outputs `prefill` and `verify` return.
        """
        ...

    def prefill(self, state: Any, token_ids: Tensor) -> TargetOutput:
        """Reads a prompt int64 `[B, n]` into the cache; logits `[B, 1, V]` of its end, taps of all."""
        ...

    def verify(self, state: Any, tree: TokenTree) -> TargetOutput:
        """Reads a tree behind the cached positions; logits and taps of every node."""
        ...

    def commit(self, state: Any, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the accepted nodes of the tree read last, in place, and drops the rest."""
        ...

    def rewind(self, state: Any, lengths: Tensor) -> None:
        """Forgets the cached positions from `lengths`, int64 `[B]` on the CPU, on."""
        ...

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 `[...]` to embeddings `[..., D]`."""
        ...

    def project(self, normed: Tensor) -> Tensor:
        """Normed hidden states `[..., D]` to logits `[..., V]`, by the output head alone."""
        ...

    def head(self, columns: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The output head over some tokens, its weights gathered once.

        Args:
            columns: int64 `[V']`: the tokens wanted; None for all.
            dtype: Of its weights and of what it is given.

        Returns:
            Normed hidden states `[..., D]` to logits `[..., V']`.
        """
        ...

    def head_rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output head's weights for tokens.

        Args:
            token_ids: int64 `[...]`.

        Returns:
            `[..., D]`, and their biases `[...]`, or None when it has none.
        """
        ...

    def fingerprint(self) -> TargetFacts:
        """What a drafter checkpoint must agree with."""
        ...


def identity(target: Target) -> object:
    """What parts are bound to when they are bound to a target.

    Args:
        target: A target. It may have an attribute `identity`: what it reads, or stands for.

    Returns:
        The same object for targets that parts need not tell apart; the target itself when it does not say.
    """
    return getattr(target, "identity", target)
