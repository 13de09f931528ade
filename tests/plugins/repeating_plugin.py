"""A plugin in one file: a drafter that bets on the anchor repeating, and a selector of shallow trees."""

import attrs
import torch

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.hookspecs import hookimpl
from treeflash.interfaces import Drafter
from treeflash.proposal import Children, Proposal


@attrs.frozen(eq=False)
class Repeats(Proposal):
    anchor: torch.Tensor
    depth: int

    def root(self):
        return torch.zeros_like(self.anchor)[:, None]

    def children(self, depth, handles):
        ids = self.anchor[:, None, None].expand(-1, handles.shape[1], 1)
        below = torch.zeros_like(ids) if depth < self.depth else torch.full_like(ids, -1)
        return Children(ids, torch.full(ids.shape, -0.5, device=ids.device), below)


@attrs.frozen
class Repeat(Drafter):
    length: int = 3
    drafts_blocks = False

    @property
    def max_depth(self):
        return self.length

    def start(self, batch_size, capacity): ...
    def extend(self, state, token_ids, taps, counts): ...
    def rewind(self, state, lengths): ...

    def propose(self, state, recent, limits):
        return Repeats(recent[:, 1], min(self.length, limits.depth))


@attrs.frozen
class Shallow(OptTree):
    levels: int = 2

    def plan(self, steps, limits):
        return attrs.evolve(super().plan(steps, limits), depth=min(self.levels, limits.depth))


@hookimpl
def treeflash_drafters():
    return {"repeat": Repeat}


@hookimpl
def treeflash_selectors():
    return {"shallow": Shallow}
