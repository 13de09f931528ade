"""A draft that grows level by level, each by one pass of the head over the nodes that are asked about."""

import attrs
import torch
from torch import Tensor

from treeflash.proposal import Children, Proposal
from treeflash.types import DraftHead
from treeflash_eagle3.network import Eagle3Network
from treeflash_eagle3.state import Eagle3State


@attrs.define(eq=False)
class Expansion(Proposal):
    """Runs the head over nodes as a selector reaches them. A handle is a child's number on its level.

    A node's state is its parent's output; it sees the context, its ancestors and itself. Keys and values of
    nodes lie in the state's scratch rows, so that only one draft of a state can be explored at a time.

    Attributes:
        anchor: int64 `[B]`.
        depth: Levels below the root that can be asked for.
        network: The head.
        head: Its embedding and output.
        state: What the context is read from.
        width: Children of a node, K.
        outputs: `[B, F, D]`: the head's outputs at the nodes whose children were answered last; at first
            those of the anchor.
    """

    anchor: Tensor
    depth: int
    network: Eagle3Network
    head: DraftHead
    state: Eagle3State
    width: int
    outputs: Tensor
    _first: int = attrs.field(init=False)
    _context: Tensor = attrs.field(init=False)
    _ancestors: Tensor = attrs.field(init=False)
    _tokens: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        lengths = self.state.lengths
        # The nodes' rows begin behind the longest context, for all sequences alike.
        self._first = int(lengths.max()) + 1
        device = self.anchor.device
        rows, last = torch.arange(self._first, device=device), lengths.to(device, non_blocking=True)
        self._context = (rows > 0) & (rows <= last[:, None])
        self._ancestors = self._context.new_zeros(len(lengths), 1, 0)

    def root(self) -> Tensor:
        """The anchor, the only node of its level."""
        return torch.zeros_like(self.anchor)[:, None]

    def children(self, depth: int, handles: Tensor) -> Children:
        """Runs the head over the nodes, unless it is the anchor, and reads its output."""
        if depth > 1:
            self._step(depth - 1, handles.clamp(min=0))
        ids, log_probs = self.head.top_k(self.network.norm(self.outputs), self.width)
        self._tokens = ids + self.network.d2t[ids]
        numbers = torch.arange(ids[0].numel(), device=ids.device).view(ids.shape[1:]).expand_as(ids)
        below = numbers if depth < self.depth else torch.full_like(numbers, -1)
        return Children(self._tokens, log_probs, below)

    def _step(self, depth: int, nodes: Tensor) -> None:
        """One pass over nodes of a level, int64 `[B, F]`, as they were numbered."""
        count, known = nodes.shape[1], self._ancestors.shape[2]
        parents = (nodes // self._tokens.shape[2])[:, :, None]
        states = self.outputs.gather(1, parents.expand(-1, -1, self.outputs.shape[2]))
        above = self._ancestors.gather(1, parents.expand(-1, -1, known))
        itself = torch.eye(count, dtype=torch.bool, device=nodes.device).expand(len(nodes), -1, -1)
        self._ancestors = torch.cat([above, itself], dim=2)

        embedded = self.head.embed(self._tokens.flatten(1).gather(1, nodes))
        # As deep, so far behind the anchor, whose position is that of the state it goes with.
        anchors = (self.state.lengths - 1).to(nodes.device, non_blocking=True)
        rotary = self.network.rotary(embedded, (anchors + depth)[:, None].expand_as(nodes))
        joined = self.network.join(embedded, states)
        begin = self._first + known
        self.state.make_room(begin + count)
        cache = self.state.cache[:, :, :, : begin + count]
        cache[:, :, :, begin:] = torch.stack(self.network.keys_values(joined, rotary))
        context = self._context[:, None].expand(-1, count, -1)
        visible = torch.cat([context, self._ancestors], dim=2)[:, None]
        self.outputs = self.network(states, joined, rotary, *cache, visible)
