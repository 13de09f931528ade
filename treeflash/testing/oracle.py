"""A drafter that knows the answer, and is wrong where it is told to be.

Random drafters are almost never right, so that a test with one shows little. The oracle is given the
text that the target is going to write, and its rate of being right at each depth.
"""

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from treeflash.interfaces import Drafter
from treeflash.target_interface import Target
from treeflash.types import BlockDraft, DraftHead, Limits

Mistake = Literal["random", "runner-up", "shifted", "not-a-number"]


@attrs.define
class OracleState:
    """What the oracle remembers of its sequence.

    Attributes:
        lengths: int64 `[B]`: positions known.
    """

    lengths: Tensor


@attrs.define(eq=False)
class Oracle(Drafter):
    """Drafts a known text through blocks whose hidden states are the logits themselves.

    Builders and refiners work on them as on any other; D is the vocabulary.

    Attributes:
        text: Prompt and continuation.
        hit_rates: For each depth of the block, how often the text's token comes first in its position.
        mistake: What comes first otherwise: any token; any token with the right one second; the token
            that belongs one position later; or a logit that is no number.
        seed: Of hits and mistakes, which are a function of it, the position and the depth.
        sharpness: Logit that the first token has above the others' spread.
    """

    text: Sequence[int]
    hit_rates: Sequence[float]
    mistake: Mistake = "random"
    seed: int = 0
    sharpness: float = 4.0
    _target: Target | None = attrs.field(default=None, init=False)

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # as many levels as there are rates
        """Levels it drafts."""
        return len(self.hit_rates)

    def bind(self, target: Target) -> None:
        """Takes the target's vocabulary."""
        self._target = target

    def start(self, batch_size: int, capacity: int) -> OracleState:
        """Knows nothing yet."""
        return OracleState(torch.zeros(batch_size, dtype=torch.int64))

    def extend(self, state: OracleState, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """Counts positions."""
        state.lengths = state.lengths + counts

    def rewind(self, state: OracleState, lengths: Tensor) -> None:
        """Forgets positions."""
        state.lengths = torch.minimum(state.lengths, lengths)

    def propose(self, state: OracleState, recent: Tensor, limits: Limits) -> BlockDraft:
        """Writes the logits of the positions behind the anchor."""
        target = self._target
        assert target is not None, "bind comes first"
        depth = min(self.max_depth, limits.depth)
        rows = [
            self._logits(int(state.lengths[0]), level, target.vocab_size) for level in range(1, depth + 1)
        ]
        logits = torch.from_numpy(np.stack(rows))[None].to(device=target.device, dtype=target.dtype)
        head = DraftHead(
            embed=lambda ids: self._embed(ids, target.vocab_size).to(logits),
            norm=lambda hidden: hidden,
            project=lambda normed: normed,
            vocab_size=target.vocab_size,
            rows=lambda ids: (functional.one_hot(ids, target.vocab_size).to(logits), None),
        )
        return BlockDraft(recent, hidden=logits, normed=logits, head=head)

    def _embed(self, ids: Tensor, vocab_size: int) -> Tensor:
        """Random embeddings as wide as the vocabulary; a row is made when it is asked for."""
        rows = [
            np.random.default_rng([self.seed, token]).standard_normal(vocab_size)
            for token in ids.flatten().tolist()
        ]
        return torch.from_numpy(np.stack(rows)).view(*ids.shape, vocab_size)

    def _logits(self, anchor_position: int, depth: int, vocab_size: int) -> np.ndarray:
        """Logits of one position, a function of (seed, anchor's position, depth)."""
        draw = np.random.default_rng([self.seed, anchor_position, depth])
        logits = draw.standard_normal(vocab_size)
        position = anchor_position + depth
        truth = self.text[position] if position < len(self.text) else int(draw.integers(vocab_size))
        first = truth
        if draw.random() >= self.hit_rates[depth - 1]:
            first = int(draw.integers(vocab_size))
            if self.mistake == "shifted" and position + 1 < len(self.text):
                first = self.text[position + 1]
            if self.mistake == "runner-up":
                logits[truth] = logits.max() + self.sharpness / 2
        logits[first] = logits.max() + self.sharpness
        if self.mistake == "not-a-number" and first != truth:
            logits[first] = np.nan
        return logits
