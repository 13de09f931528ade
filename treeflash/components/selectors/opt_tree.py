"""The tree with the greatest expected number of accepted tokens."""

from collections.abc import Sequence

import attrs
import torch
from attrs.validators import and_, ge, le, optional
from torch import Tensor

from treeflash.components.selectors import best_first
from treeflash.interfaces import Selector
from treeflash.proposal import Proposal, usable
from treeflash.ranges import MOST_NODES
from treeflash.statistics import StepRecord
from treeflash.tree import TokenTree, trims
from treeflash.types import Limits


@attrs.frozen
class OptTree(Selector):
    """Keeps the `budget` heaviest nodes: best first on a CPU, level by level without leaving a GPU.

    The expected number of accepted tokens is the sum of the nodes' weights, and a weight never grows
    along a path: so the heaviest nodes form a tree, and no tree of that size is better. Drafts that are not
    known beforehand are explored level by level on a CPU too; the trees are the same.

    Source: OPT-Tree (Wang et al. 2024, arXiv:2406.17276).

    Attributes:
        budget: Draft nodes, the root excluded, up to 4096.
        depth: Levels drafted at most; as many as the drafter gives when not set. Deep levels seldom
            enter a small tree, and cost a row of the vocabulary's width each to look at.
        beam: Nodes of a level whose children are looked at; exact when not below the budget, which
            is the default.
    """

    budget: int = attrs.field(default=63, validator=and_(ge(0), le(MOST_NODES)))
    depth: int | None = attrs.field(default=None, validator=optional(ge(1)))
    beam: int | None = attrs.field(default=None, validator=optional(ge(1)))

    def plan(self, steps: Sequence[StepRecord], limits: Limits) -> Limits:
        """Cuts nodes and depth."""
        depth = limits.depth if self.depth is None else min(limits.depth, self.depth)
        return attrs.evolve(limits, nodes=min(limits.nodes, self.budget), depth=depth)

    def select(self, proposal: Proposal, limits: Limits) -> TokenTree:
        """Takes the nodes from a table where there is one on a CPU; else explores level by level."""
        depth = min(limits.depth, proposal.depth)
        beam = min(limits.nodes, self.beam or limits.nodes)
        table = proposal.table
        if table is not None and trims(proposal.anchor.device) and beam == limits.nodes:
            tree = best_first.heaviest(proposal.anchor, table, limits.nodes, depth)
            if tree is not None:
                return tree
        return _level_by_level(proposal, limits.nodes, depth, beam)


def _level_by_level(proposal: Proposal, nodes: int, depth_limit: int, beam: int) -> TokenTree:
    """Explores the levels, then keeps the heaviest nodes of all."""
    root = TokenTree.root_only(proposal.anchor)
    # Nodes in the order found: depth by depth, by falling weight within one.
    tokens, parents, depths, weights = [root.token_ids], [root.parents], [root.depths], [root.log_weights]
    handles, level_weights = proposal.root(), root.log_weights
    level_index = torch.zeros_like(handles)
    found = 1
    for depth in range(1, depth_limit + 1):
        children = proposal.children(depth, handles)
        width = children.token_ids.shape[2]
        paths = level_weights[:, :, None] + usable(children.log_probs)
        paths = paths.masked_fill((handles < 0)[:, :, None], -torch.inf)
        best, order = paths.flatten(1).sort(dim=1, descending=True, stable=True)
        best, order = best[:, :nodes], order[:, :nodes]
        tokens.append(children.token_ids.flatten(1).gather(1, order))
        parents.append(level_index.gather(1, order // width))
        depths.append(torch.full_like(order, depth))
        weights.append(best)
        level_index = torch.arange(found, found + best.shape[1], device=best.device).expand_as(order)
        found += best.shape[1]

        handles = children.handles.flatten(1).gather(1, order)
        handles, level_index, level_weights = _frontier(
            handles[:, :beam], level_index[:, :beam], best[:, :beam], torch.cat(weights, 1), nodes
        )
        if handles.shape[1] == 0:
            break
    return _keep_heaviest(
        torch.cat(tokens, 1),
        torch.cat(parents, 1),
        torch.cat(depths, 1),
        torch.cat(weights, 1),
        nodes + 1,
        depth_limit,
    )


def _frontier(
    handles: Tensor, index: Tensor, weights: Tensor, found: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Drops the nodes below which nothing can enter the tree any more."""
    bar = found.topk(min(nodes + 1, found.shape[1]), dim=1).values[:, -1:]
    if found.shape[1] <= nodes:
        bar = torch.full_like(bar, -torch.inf)
    alive = (handles >= 0) & (weights >= bar) & (weights > -torch.inf)
    if trims(handles.device):
        # By falling weight, so the live ones need not be packed, only cut behind the last. Asking a
        # GPU where that is would cost a transfer; there the dead ones stay, masked.
        columns = alive.any(dim=0).nonzero()
        width = int(columns[-1]) + 1 if len(columns) else 0
        handles, index, weights, alive = (part[:, :width] for part in (handles, index, weights, alive))
    return handles.masked_fill(~alive, -1), index, weights


def _keep_heaviest(
    tokens: Tensor, parents: Tensor, depths: Tensor, weights: Tensor, size: int, max_depth: int
) -> TokenTree:
    """Sorts all nodes by weight, parents first among equals, and keeps the first `size`."""
    ordered, order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    num_nodes = (ordered > -torch.inf).sum(dim=1).clamp(max=size)
    order = order[:, :size]
    old_parents = parents.gather(1, order)
    new_parents = rank.gather(1, old_parents.clamp(min=0)).masked_fill(old_parents < 0, -1)
    tree = TokenTree(
        token_ids=tokens.gather(1, order),
        parents=new_parents,
        depths=depths.gather(1, order),
        log_weights=ordered[:, :size],
        num_nodes=num_nodes,
        max_depth=max_depth,
    )
    return tree.first(int(num_nodes.max())) if trims(order.device) else tree
