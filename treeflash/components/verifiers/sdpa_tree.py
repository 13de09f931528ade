"""Exact verification: the target's own choice at every node, in one pass over the tree."""

import attrs
import torch

from treeflash.errors import CompositionError
from treeflash.interfaces import Verifier
from treeflash.sampling import Draws
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState

_MILLION = 1_000_000


@attrs.frozen
class SdpaTree(Verifier):
    """Walks from the root along the target's choices for as long as the tree has them.

    Every emitted token is the target's own choice, so the text is the target's at any temperature,
    whatever was drafted. Attention runs through the target's own masked SDPA path.
    """

    def verify(self, target: Target, state: DecodeState, tree: TokenTree, draws: Draws) -> Acceptance:
        """Chooses at every node, then compares on the host: the step's one transfer from the device."""
        output = target.verify(state.target, tree)
        choices = draws.choose(output.logits, state.lengths, tree.depths, tree.max_depth)
        parents = tree.parents.masked_fill(~tree.is_node, -1)
        anchors = state.anchor[:, None].expand_as(parents)
        # Numbers of another kind cross with the rest, in millionths.
        promised = (tree.log_weights.exp().masked_fill(parents < 0, 0) * _MILLION).long()
        host = torch.stack([choices, tree.token_ids, parents, anchors, promised], dim=1).tolist()
        walks = [_walk(*row[:4]) for row in host]
        paths = [walk.path for walk in walks]
        return Acceptance(
            paths=paths,
            tokens=[[row[0][node] for node in path] for row, path in zip(host, paths, strict=True)],
            num_drafted=[walk.num_drafted for walk in walks],
            depths=[walk.depth for walk in walks],
            taps=_path_taps(output.taps, paths),
            expected=[sum(row[4]) / _MILLION for row in host],
        )


@attrs.frozen
class _Walk:
    """What a row's tree came to."""

    path: list[int]
    num_drafted: int
    depth: int


def _walk(choices: list[int], tokens: list[int], parents: list[int], anchors: list[int]) -> _Walk:
    """Goes down from the root for as long as the choice at a node is one of its children."""
    if tokens[0] != anchors[0]:
        raise CompositionError(
            f"the selector's tree has token {tokens[0]} for its root, expected the anchor {anchors[0]}"
        )
    child: dict[tuple[int, int], int] = {}
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            child[parent, tokens[node]] = node
            depths[node] = depths[parent] + 1
    path = [0]
    while (node := child.get((path[-1], choices[path[-1]]), -1)) >= 0:
        path.append(node)
    return _Walk(path, len(child), max(depths))


def _path_taps(taps: torch.Tensor | None, paths: list[list[int]]) -> torch.Tensor | None:
    if taps is None:
        return None
    longest = max(map(len, paths))
    rows = [path + [0] * (longest - len(path)) for path in paths]
    if rows == [list(range(longest))] * len(rows):
        return taps[:, :longest]
    index = torch.tensor(rows).to(taps.device, non_blocking=True)
    return taps.gather(1, index[:, :, None].expand(-1, -1, taps.shape[-1]))
