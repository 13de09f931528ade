"""One path: the likeliest child of the likeliest child, as in DFlash and plain drafting."""

from collections.abc import Sequence

import attrs
import torch
from attrs.validators import ge, optional

from treeflash.interfaces import Selector
from treeflash.proposal import Proposal, usable
from treeflash.statistics import StepRecord
from treeflash.tree import TokenTree, trims
from treeflash.types import Limits


@attrs.frozen
class Chain(Selector):
    """Follows the best child of each node; behind a refiner, of the token really drafted.

    Attributes:
        budget: Draft nodes, the root excluded; as many as the drafter gives when not set.
    """

    budget: int | None = attrs.field(default=None, validator=optional(ge(0)))

    def plan(self, steps: Sequence[StepRecord], limits: Limits) -> Limits:
        """A chain has as many levels as nodes."""
        length = min(limits.nodes, limits.depth)
        if self.budget is not None:
            length = min(length, self.budget)
        return attrs.evolve(limits, nodes=length, depth=length)

    def select(self, proposal: Proposal, limits: Limits) -> TokenTree:
        """Walks down until the limit or a node without children."""
        root = TokenTree.root_only(proposal.anchor)
        tokens, weights = [root.token_ids], [root.log_weights]
        handles = proposal.root()
        for depth in range(1, min(limits.nodes, limits.depth, proposal.depth) + 1):
            children = proposal.children(depth, handles)
            log_probs, best = usable(children.log_probs).max(dim=2)
            tokens.append(children.token_ids.gather(2, best[..., None])[..., 0])
            weights.append((weights[-1] + log_probs).masked_fill(handles < 0, -torch.inf))
            handles = children.handles.gather(2, best[..., None])[..., 0].masked_fill(handles < 0, -1)
        token_ids, log_weights = torch.cat(tokens, 1), torch.cat(weights, 1)
        num_nodes = (log_weights > -torch.inf).sum(dim=1)
        slots = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        tree = TokenTree(token_ids, slots - 1, slots, log_weights, num_nodes, token_ids.shape[1] - 1)
        return tree.first(int(num_nodes.max())) if trims(token_ids.device) else tree
