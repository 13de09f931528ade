"""Exact verification: the target's own choice at every node, in one pass over the tree."""

import attrs
import torch

from treeflash.interfaces import Target, Verifier
from treeflash.sampling import Draws
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState


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
        host = torch.stack([choices, tree.token_ids, parents], dim=1).tolist()
        paths, tokens = [], []
        for row_choices, row_tokens, row_parents in host:
            child = {
                (parent, token): node
                for node, (token, parent) in enumerate(zip(row_tokens, row_parents, strict=True))
                if parent >= 0
            }
            node, path = 0, [0]
            while (node := child.get((node, row_choices[node]), -1)) >= 0:
                path.append(node)
            paths.append(path)
            tokens.append([row_choices[node] for node in path])
        return Acceptance(paths=paths, tokens=tokens, taps=_path_taps(output.taps, paths))


def _path_taps(taps: torch.Tensor | None, paths: list[list[int]]) -> torch.Tensor | None:
    if taps is None:
        return None
    longest = max(map(len, paths))
    rows = [path + [0] * (longest - len(path)) for path in paths]
    if rows == [list(range(longest))] * len(rows):
        return taps[:, :longest]
    index = torch.tensor(rows).to(taps.device, non_blocking=True)
    return taps.gather(1, index[:, :, None].expand(-1, -1, taps.shape[-1]))
