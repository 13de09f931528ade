"""The M likeliest tokens of each depth as contexts for the next: TreeFlash's first stage."""

import math

import attrs
import torch
from attrs.validators import and_, ge, lt
from torch import Tensor

from treeflash.interfaces import TreeBuilder
from treeflash.ranges import MOST_NODES
from treeflash.types import BlockDraft, Lattice, Limits


@attrs.frozen
class TopM(TreeBuilder):
    """Lays out `branching` contexts per depth.

    With a refiner that looks at two tokens the contexts are pairs: the anchor with each of the M
    tokens at depth 2, below it the M pairs of the greatest joint probability.

    Attributes:
        branching: Contexts per depth, M; no more than the largest tree has nodes.
        children: Children kept per context, K; no more than a tree has nodes.
        least: Contexts behind a token of less probability are left out, the likeliest excepted. By the
            backbone no node that ends in a token is likelier than the token itself, so that below the weight
            of a tree's last node they are seldom worth the work.
    """

    branching: int = attrs.field(default=16, validator=ge(1))
    children: int = attrs.field(default=16, validator=ge(1))
    least: float = attrs.field(default=0.0, validator=and_(ge(0), lt(1)))

    def build(self, draft: BlockDraft, history: int, limits: Limits) -> Lattice:
        """Takes the contexts from the backbone's own distributions."""
        # A tree of n nodes takes none but the n likeliest children of a context.
        children = min(self.children, limits.nodes)
        if history == 0:
            return single_context(draft, children)
        tokens, log_probs = draft.top_k(min(self.branching, MOST_NODES))
        width = tokens.shape[-1]
        first = draft.recent[:, None, None, 2 - history :].expand(-1, 1, width, -1)
        contexts = first
        is_context = torch.zeros(contexts.shape[:3], dtype=torch.bool, device=contexts.device)
        if draft.depth > 1:
            above, weights = tokens[:, :-1], log_probs[:, :-1]
            below = above[..., None]
            if history == 2:
                below, weights = _pairs(draft.recent[:, 1], above, weights)
            contexts = torch.cat([first, below], dim=1)
            likely = weights >= (math.log(self.least) if self.least else -torch.inf)
            is_context = torch.cat([is_context, likely], dim=1)
        is_context[:, :, 0] = True
        return Lattice(contexts, is_context, children)


def single_context(draft: BlockDraft, children: int) -> Lattice:
    """The lattice of distributions that depend on no earlier token: one empty context a depth.

    Args:
        draft: The backbone's draft.
        children: Children kept per depth.

    Returns:
        A lattice with C = 1 and H = 0.
    """
    shape = (draft.recent.shape[0], draft.depth, 1)
    contexts = draft.recent.new_zeros((*shape, 0))
    return Lattice(contexts, contexts.new_ones(shape, dtype=torch.bool), children)


def _pairs(anchor: Tensor, tokens: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Contexts of two tokens for the depths from 2 on.

    Args:
        anchor: int64 `[B]`.
        tokens: int64 `[B, P - 1, M]`: the likeliest of each depth but the last.
        log_probs: Their log-probabilities.

    Returns:
        Contexts `[B, P - 1, M, 2]`, the likeliest pairs of each depth first, and the log-probabilities of
        their later tokens `[B, P - 1, M]`.
    """
    width = tokens.shape[-1]
    second = torch.stack([anchor[:, None].expand(-1, width), tokens[:, 0]], dim=-1)[:, None]
    left, right = _likeliest_pairs(width, tokens.device)
    joint = log_probs[:, :-1, left] + log_probs[:, 1:, right]
    best = joint.topk(width, dim=-1).indices
    left, right = left[best], right[best]
    deeper = torch.stack([tokens[:, :-1].gather(2, left), tokens[:, 1:].gather(2, right)], dim=-1)
    weights = torch.cat([log_probs[:, :1], log_probs[:, 1:].gather(2, right)], dim=1)
    return torch.cat([second, deeper], dim=1), weights


def _likeliest_pairs(width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ranks, from 0, of the pairs that can be among the `width` likeliest, int64 `[n]` each.

    No pair of ranks as good or better is less likely: a pair (i, j) has (i + 1) (j + 1) - 1 such before it.
    """
    ranks = torch.arange(width)
    counts = width // (ranks + 1)
    left = ranks.repeat_interleave(counts)
    right = torch.arange(len(left)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return left.to(device, non_blocking=True), right.to(device, non_blocking=True)
