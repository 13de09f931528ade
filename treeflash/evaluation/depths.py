"""How near a draft's distributions are to the target's, depth by depth."""

from typing import Any

import attrs
import torch
from torch import Tensor

from treeflash.engine import Decoder
from treeflash.types import BlockDraft

# A token is covered when it is among so many likeliest ones.
COVERS = (1, 2, 3, 5, 10)


@attrs.define(eq=False)
class DepthMeasure:
    """Sums over drafts of one distribution, by depth.

    Attributes:
        depth: Depths measured, P.
        distances: Sums of total variation distances to the target's conditional, float64 `[P]`.
        squares: Of their squares.
        covered: How often the target's token was among the k likeliest, int64 `[P, len(COVERS)]`.
        count: Drafts measured at each depth, int64 `[P]`.
    """

    depth: int
    distances: Tensor = attrs.field(init=False)
    squares: Tensor = attrs.field(init=False)
    covered: Tensor = attrs.field(init=False)
    count: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.distances = torch.zeros(self.depth, dtype=torch.float64)
        self.squares = torch.zeros(self.depth, dtype=torch.float64)
        self.covered = torch.zeros(self.depth, len(COVERS), dtype=torch.int64)
        self.count = torch.zeros(self.depth, dtype=torch.int64)

    def add(self, drafted: Tensor, conditional: Tensor, tokens: Tensor) -> None:
        """Counts a draft.

        Args:
            drafted: float32 `[d, V']`: probabilities at depth 1 to d; tokens past V' have none.
            conditional: float32 `[d, V]`: the target's, given what it wrote before.
            tokens: int64 `[d]`: what it wrote.
        """
        depths, width = drafted.shape
        missing = conditional[:, width:].sum(dim=1)
        distance = 0.5 * ((drafted - conditional[:, :width]).abs().sum(dim=1) + missing)
        distance = distance.double().cpu()
        self.distances[:depths] += distance
        self.squares[:depths] += distance**2
        best = drafted.topk(min(max(COVERS), width), dim=1).indices
        hits = best == tokens[:, None]
        for place, most in enumerate(COVERS):
            self.covered[:depths, place] += hits[:, :most].any(dim=1).cpu()
        self.count[:depths] += 1

    def summary(self) -> dict[str, Any]:
        """Means by depth: `tvd` with its standard error over drafts `tvd_error`, and `coverage` by k.

        Returns:
            A list of P each; None at depths that no draft was measured at.
        """
        count = self.count
        mean = self.distances / count
        variance = (self.squares / count - mean**2).clamp(min=0)
        return {
            "drafts": count.tolist(),
            "tvd": self.known(mean),
            "tvd_error": self.known((variance / count).sqrt()),
            "coverage": {
                str(most): self.known(self.covered[:, place] / count) for place, most in enumerate(COVERS)
            },
        }

    def known(self, means: Tensor) -> list[float | None]:
        """Means by depth as JSON has them.

        Args:
            means: `[P]`.

        Returns:
            P of them, None where no draft was measured.
        """
        return [
            mean if drafts else None for mean, drafts in zip(means.tolist(), self.count.tolist(), strict=True)
        ]


@torch.inference_mode()
def distributions(decoder: Decoder, draft: BlockDraft, tokens: Tensor) -> dict[str, Tensor]:
    """What a draft says of each position, before and behind the refiner.

    Args:
        decoder: Its refiner is asked.
        draft: A backbone's draft of P positions, one row.
        tokens: int64 `[2 + P]`: the token before the anchor, the anchor, and what the target wrote behind it:
            the refiner is given the true previous tokens.

    Returns:
        Probabilities float32 `[P, V]` by "backbone" and, when a refiner changes them, "refined".
    """
    head = draft.head
    scored = head.logits(draft.normed)[0].softmax(dim=-1)
    index = head.tokens(torch.arange(head.width, device=scored.device))
    found = {"backbone": scored.new_zeros(draft.depth, head.vocab_size).index_copy_(1, index, scored)}
    refiner = decoder.refiner
    if refiner is None or refiner.history == 0:
        return found
    depth, history = draft.depth, refiner.history
    slots = torch.arange(depth, device=tokens.device)
    # Behind slot i stand the tokens 2 + i - history to 1 + i.
    window = (2 - history) + torch.arange(history, device=tokens.device)
    previous = tokens[slots[:, None] + window][None]
    scored_anew = head.width if refiner.candidates is None else min(refiner.candidates, head.width)
    ids, log_probs = refiner.children(draft, slots, previous, scored_anew)
    refined, others = log_probs[0].exp(), found["backbone"].scatter(1, ids[0], 0.0)
    left = (1 - refined.sum(dim=1, keepdim=True)).clamp(min=0)
    others *= left / others.sum(dim=1, keepdim=True).clamp(min=torch.finfo(others.dtype).tiny)
    found["refined"] = others.scatter_(1, ids[0], refined)
    return found
