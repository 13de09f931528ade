"""Exact verification: the target's own choices along the tree, which it reads in one pass."""

from collections.abc import Callable
from functools import partial

import attrs
import torch

from treeflash.errors import CompositionError
from treeflash.interfaces import Verifier
from treeflash.sampling import Draws
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState, TreeFigures

_MILLION = 1_000_000


@attrs.frozen
class SdpaTree(Verifier):
    """Walks from the root along the target's choices for as long as the tree has them.

    Every emitted token is the target's own choice, so the text is the target's at any temperature,
    whatever was drafted.
    """

    def verify(self, target: Target, state: DecodeState, tree: TokenTree, draws: Draws) -> Acceptance:
        """Walks on the host: what it needs of the tree is the step's one transfer from the device."""
        output = target.verify(state.target, tree)
        parents = tree.parents.masked_fill(~tree.is_node, -1)
        anchors = state.anchor[:, None].expand_as(parents)
        # Numbers of another kind cross with the rest, in millionths.
        promised = (tree.log_weights.exp().masked_fill(parents < 0, 0) * _MILLION).long()
        columns = [tree.token_ids, parents, anchors, promised]
        lazy = chooses_on_the_way(output.logits.device)
        if not lazy:
            columns.append(draws.choose(output.logits, state.lengths, tree.depths, tree.max_depth))
        host = torch.stack(columns, dim=1).tolist()
        walks = []
        for row, (tokens, above, anchor, *_) in enumerate(host):
            if lazy:
                choose = partial(_choose, draws, output.logits[row], int(state.lengths[row]), row)
            else:
                choose = partial(_look_up, host[row][-1])
            walks.append(_walk(choose, tokens, above, anchor[0]))
        figures = TreeFigures(
            num_drafted=[walk.num_drafted for walk in walks],
            depths=[walk.depth for walk in walks],
            expected=[sum(row[3]) / _MILLION for row in host],
        )
        paths, chosen = [walk.path for walk in walks], [walk.chosen for walk in walks]
        return Acceptance.of(tree, paths, chosen, output, figures)


def chooses_on_the_way(device: torch.device) -> bool:
    """Whether a token is chosen at the nodes of the path alone.

    Args:
        device: Where the logits are.

    Returns:
        True where each choice may be asked for by itself; on a GPU each would be a transfer, and all nodes'
        are made at once.
    """
    return device.type == "cpu"


def _choose(draws: Draws, logits: torch.Tensor, length: int, row: int, node: int, depth: int) -> int:
    """The target's choice behind a node."""
    return draws.choose_one(logits[node], length + depth, row)


def _look_up(choices: list[int], node: int, depth: int) -> int:
    """The target's choice behind a node, made before."""
    return choices[node]


@attrs.frozen
class _Walk:
    """What a row's tree came to."""

    path: list[int]
    chosen: list[int]
    num_drafted: int
    depth: int


def _walk(choose: Callable[[int, int], int], tokens: list[int], parents: list[int], anchor: int) -> _Walk:
    """Goes down from the root for as long as the choice at a node is one of its children."""
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
    path, chosen = [0], [choose(0, 0)]
    while (node := child.get((path[-1], chosen[-1]), -1)) >= 0:
        path.append(node)
        chosen.append(choose(node, len(path) - 1))
    return _Walk(path, chosen, len(child), max(depths))
