"""Exact verification: the target's own choices along the tree, which it reads in one pass."""

import math
from collections.abc import Callable
from functools import partial

import attrs
import torch

from treeflash.errors import CompositionError
from treeflash.interfaces import Verifier
from treeflash.proposal import usable
from treeflash.sampling import Draws
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState, TargetOutput, TreeFigures

_MILLION = 1_000_000


@attrs.frozen
class SdpaTree(Verifier):
    """Walks from the root along the target's choices for as long as the tree has them.

    Every emitted token is the target's own choice, so the text is the target's at any temperature,
    whatever was drafted.

    The keys or values of a drafted token may overflow. No mask keeps that from the other nodes (0 * NaN is
    NaN): their logits become NaN. So the path ends before the first node whose logits are not finite, and
    where those of the root are not, the root is read again by itself, as plain decoding reads it.
    """

    def verify(self, target: Target, state: DecodeState, tree: TokenTree, draws: Draws) -> Acceptance:
        """Walks on the host: what it needs of the tree is the step's one transfer from the device."""
        output = target.verify(state.target, tree)
        walks, host = _walks(output, state, tree, draws)
        figures = TreeFigures(
            num_drafted=[walk.num_drafted for walk in walks],
            depths=[walk.depth for walk in walks],
            expected=[sum(row[3]) / _MILLION for row in host],
        )
        if tree.size > 1 and not all(walk.finite for walk in walks):
            root = TokenTree.root_only(state.anchor)
            output = target.verify(state.target, root)
            walks, _ = _walks(output, state, root, draws)
        paths, chosen = [walk.path for walk in walks], [walk.chosen for walk in walks]
        return Acceptance.of(tree, paths, chosen, output, figures)


def _walks(
    output: TargetOutput, state: DecodeState, tree: TokenTree, draws: Draws
) -> tuple[list["_Walk"], list[list[list[int]]]]:
    """Walks each row's tree.

    Returns:
        The walks, and what was transferred of each row: tokens, parents, anchors, and weights in millionths.
    """
    parents = tree.parents.masked_fill(~tree.is_node, -1)
    anchors = state.anchor[:, None].expand_as(parents)
    # Numbers of another kind cross with the rest, in millionths.
    promised = (usable(tree.log_weights).exp().masked_fill(parents < 0, 0) * _MILLION).long()
    columns = [tree.token_ids, parents, anchors, promised, tree.depths]
    lazy = chooses_on_the_way(output.logits.device)
    if not lazy:
        chosen = draws.choose(output.logits, state.lengths, tree.depths, tree.max_depth)
        # A NaN among the logits is the one that is chosen.
        best = output.logits.gather(2, chosen[..., None])[..., 0]
        columns += [chosen, best.isfinite().long()]
    host = torch.stack(columns, dim=1).tolist()
    walks = []
    for row, (tokens, above, anchor, _, depths, *_) in enumerate(host):
        if lazy:
            choose = partial(_choose, draws, output.logits[row], int(state.lengths[row]), row)
        else:
            choose = partial(_look_up, *host[row][-2:])
        walks.append(_walk(choose, tokens, above, anchor[0], depths, tree.max_depth))
    return walks, host


def chooses_on_the_way(device: torch.device) -> bool:
    """Whether a token is chosen at the nodes of the path alone.

    Args:
        device: Where the logits are.

    Returns:
        True where each choice may be asked for by itself; on a GPU each would be a transfer, and all nodes'
        are made at once.
    """
    return device.type == "cpu"


def _choose(
    draws: Draws, logits: torch.Tensor, length: int, row: int, node: int, depth: int
) -> tuple[int, bool]:
    """The target's choice after a node, and whether its logits are finite."""
    token = draws.choose_one(logits[node], length + depth, row)
    # A NaN among the logits is the one that is chosen.
    return token, math.isfinite(logits[node, token].item())


def _look_up(choices: list[int], finite: list[int], node: int, depth: int) -> tuple[int, bool]:
    """The target's choice after a node, made before, and whether its logits are finite."""
    return choices[node], bool(finite[node])


@attrs.frozen
class _Walk:
    """What a row's tree came to.

    Attributes:
        path: Nodes accepted, the root first.
        chosen: The target's choice after each.
        finite: Whether the root's logits are finite; those of the other nodes on the path are.
        num_drafted: Nodes of the tree, without the root.
        depth: Of the deepest.
    """

    path: list[int]
    chosen: list[int]
    finite: bool
    num_drafted: int
    depth: int


def _walk(
    choose: Callable[[int, int], tuple[int, bool]],
    tokens: list[int],
    parents: list[int],
    anchor: int,
    told: list[int],
    deepest: int,
) -> _Walk:
    """Goes down from the root for as long as the choice at a node is one of its children.

    Args:
        choose: The target's choice after a node at a depth, and whether its logits are finite.
        tokens: Of the nodes.
        parents: Of the nodes; -1 for the root and for empty slots.
        anchor: What the root has to be.
        told: Depths of the nodes, as the tree has them: it was read at the positions they give.
        deepest: The tree's depth, as it has it.
    """
    if tokens[0] != anchor:
        raise CompositionError(
            f"the selector's tree has token {tokens[0]} for its root, expected the anchor {anchor}"
        )
    child: dict[tuple[int, int], int] = {}
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            child[parent, tokens[node]] = node
            depths[node] = depths[parent] + 1
            if told[node] != depths[node] or depths[node] > deepest:
                raise CompositionError(
                    f"the selector's tree has depth {told[node]} for node {node} and {deepest} for the "
                    f"deepest, expected depth {depths[node]} for that node, one more than its parent's"
                )
    token, finite = choose(0, 0)
    path, chosen = [0], [token]
    while finite and (node := child.get((path[-1], token), -1)) >= 0:
        token, sound = choose(node, len(path))
        if not sound:
            break  # it is the next root, and read again
        path.append(node)
        chosen.append(token)
    return _Walk(path, chosen, finite, len(child), max(depths))
