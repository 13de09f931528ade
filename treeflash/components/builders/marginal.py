"""One context per depth: every branch shares the backbone's own distribution, as in DDTree."""

import attrs

from treeflash.components.builders.top_m import single_context
from treeflash.interfaces import TreeBuilder
from treeflash.types import BlockDraft, Lattice, Limits


@attrs.frozen
class Marginal(TreeBuilder):
    """Keeps as many tokens a depth as the tree has nodes, so that the selected tree is optimal."""

    max_history = 0

    def build(self, draft: BlockDraft, history: int, limits: Limits) -> Lattice:
        """Lays out the single context of each depth."""
        return single_context(draft, limits.nodes)
