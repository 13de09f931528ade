"""No contexts in advance: the refiner is asked about the nodes that the selector reaches."""

import attrs
from attrs.validators import ge

from treeflash.interfaces import TreeBuilder
from treeflash.types import BlockDraft, Limits, OnDemand


@attrs.frozen
class Frontier(TreeBuilder):
    """Refines level by level, for the frontier alone: fewer evaluations, one small pass a depth.

    Attributes:
        children: Children kept per node, K; no more than a tree has nodes.
    """

    children: int = attrs.field(default=16, validator=ge(1))

    def build(self, draft: BlockDraft, history: int, limits: Limits) -> OnDemand:
        """Leaves the contexts to the selector."""
        return OnDemand(min(self.children, limits.nodes))
