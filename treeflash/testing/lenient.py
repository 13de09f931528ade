"""A verifier that is lossy on purpose, to see that whatever looks for the target's own text leaves it out."""

import attrs
import torch
from attrs.validators import and_, ge, le

from treeflash.interfaces import Verifier
from treeflash.sampling import Draws
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState


@attrs.frozen
class Lenient(Verifier):
    """Descends to the first child that the target finds likely enough, and ends with its likeliest token.

    Attributes:
        least: Probability that is enough.
    """

    least: float = attrs.field(default=0.0, validator=and_(ge(0), le(1)))
    lossless = False

    def verify(self, target: Target, state: DecodeState, tree: TokenTree, draws: Draws) -> Acceptance:
        """Looks at the target's probabilities; no draw is made."""
        output = target.verify(state.target, tree)
        parents = tree.parents.masked_fill(~tree.is_node, -1)
        probabilities = torch.softmax(output.logits.float(), dim=-1)
        likely = probabilities.gather(1, parents.clamp(min=0)[..., None].expand_as(probabilities))
        likely = likely.gather(2, tree.token_ids[..., None])[..., 0]
        rows = zip(
            parents.tolist(),
            tree.token_ids.tolist(),
            (likely >= self.least).tolist(),
            output.logits.argmax(dim=-1).tolist(),
            strict=True,
        )
        paths, tokens = [], []
        for above, drafted, enough, best in rows:
            path = [0]
            for node in range(1, len(above)):  # the children of a node come after it
                if above[node] == path[-1] and enough[node]:
                    path.append(node)
            paths.append(path)
            tokens.append([*(drafted[node] for node in path[1:]), best[path[-1]]])
        return Acceptance.of(tree, paths, tokens, output)
