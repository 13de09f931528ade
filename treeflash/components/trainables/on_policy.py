"""Contexts that a drafter makes for itself, and what the target says to them.

Taught by the text alone, a refiner never sees a token that the target would not have written; in a tree most
of its contexts are such. Here its contexts are the nodes of the drafter's own trees, labelled by one pass of
the target over all of them.
"""

import attrs
import torch
from torch import Tensor

from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.trained import TrainedRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.packed_text import PackedText
from treeflash.trainable import TrainingTarget
from treeflash.tree import TokenTree
from treeflash.types import BlockDraft, Limits

_BRANCHING = 4


@attrs.frozen(eq=False)
class Nodes:
    """Contexts in trees, R in all.

    Attributes:
        block: int64 `[R]`: whose tree each is in.
        slot: int64 `[R]`: the draft position that follows it.
        previous: int64 `[R, history]`: the tokens that end there.
        wanted: `[R, D]`: the target's state there.
        weight: float32 `[R]`: probability of its path, by the drafter.
    """

    block: Tensor
    slot: Tensor
    previous: Tensor
    wanted: Tensor
    weight: Tensor


@torch.no_grad()
def own_contexts(
    target: TrainingTarget,
    refiner: TrainedRefiner,
    draft: BlockDraft,
    text: PackedText,
    anchors: Tensor,
    budget: int,
) -> Nodes:
    """Draws a tree at each anchor and lets the target read them all.

    Args:
        target: The target.
        refiner: The refiner, as it is now.
        draft: The blocks' drafts, B = A.
        text: The row.
        anchors: int64 `[A]`: where in it the blocks begin.
        budget: Nodes of each tree.

    Returns:
        The contexts that a draft position follows.
    """
    limits = Limits(budget, draft.depth)
    lattice = TopM(_BRANCHING, _BRANCHING).build(draft, refiner.history, limits)
    tree = OptTree(budget).select(refiner.refine(draft, lattice), limits)
    normed = _read(target, text, anchors, tree)
    usable = tree.is_node & (tree.depths < draft.depth)
    stops = torch.tensor(target.stop_ids, dtype=torch.int64, device=anchors.device)
    # What follows the end of a text is nobody's business.
    ended = torch.isin(tree.token_ids, stops) & (tree.depths > 0)
    usable &= ~(tree.ancestor_mask() & ended[:, None, :]).any(dim=-1)
    block, node = usable.nonzero(as_tuple=True)
    previous = tree.token_ids[block, node][:, None]
    if refiner.history == 2:
        parent = tree.parents[block, node]
        older = tree.token_ids[block, parent.clamp(min=0)]
        before = torch.where(parent < 0, draft.recent[block, 0], older)
        previous = torch.cat([before[:, None], previous], dim=1)
    return Nodes(
        block=block,
        slot=tree.depths[block, node],
        previous=previous,
        wanted=normed[block, node],
        weight=tree.log_weights[block, node].exp().float(),
    )


def _read(target: TrainingTarget, text: PackedText, anchors: Tensor, tree: TokenTree) -> Tensor:
    """The target's final states at all nodes, `[A, N, D]`: a pass over the row and every tree behind it."""
    count, size = tree.token_ids.shape
    length = text.token_ids.shape[0]
    is_node = tree.is_node
    ids = torch.cat([text.token_ids, tree.token_ids.masked_fill(~is_node, 0).flatten()])
    depths = tree.depths.masked_fill(~is_node, 0)
    positions = torch.cat([text.positions, (text.positions[anchors][:, None] + depths).flatten()])
    visible = torch.zeros(len(ids), len(ids), dtype=torch.bool, device=ids.device)
    visible[:length, :length] = text.causal_visibility()
    # The root is the anchor again, so a node sees the text before it.
    index = torch.arange(length, device=ids.device)
    before = (text.text_of[None] == text.text_of[anchors][:, None]) & (index[None] < anchors[:, None])
    visible[length:, :length] = before.repeat_interleave(size, dim=0)
    own = torch.arange(count * size, device=ids.device).view(count, size)
    visible[length + own[:, :, None], length + own[:, None, :]] = tree.ancestor_mask()
    states = target.read(ids, positions, visible, (target.num_layers - 1,))
    return states[length:].view(count, size, -1)
