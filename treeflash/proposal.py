"""Drafts that can be explored level by level, the form every selector reads."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from treeflash.types import Transitions

# Handles have tokens in them, a part of so many bits each.
TOKEN_BITS = 31


@attrs.frozen(eq=False)
class Children:
    """The best children of some nodes.

    Attributes:
        token_ids: int64 `[B, F, K]`, distinct along K.
        log_probs: float32 `[B, F, K]`, given the path; -inf for a slot that holds no child.
        handles: int64 `[B, F, K]`: what to ask `Proposal.children` with to go on below a child, -1
            when there is nothing below.
    """

    token_ids: Tensor
    log_probs: Tensor
    handles: Tensor


class Proposal(ABC):
    """A draft that can be explored level by level."""

    @property
    @abstractmethod
    def anchor(self) -> Tensor:
        """The root's token, int64 `[B]`."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Levels below the root that can be asked for."""

    @property
    def table(self) -> Transitions | None:
        """All of it at once, the root being context 0 of depth 1; None where it is found out by asking."""
        return None

    @abstractmethod
    def root(self) -> Tensor:
        """The root's handle, int64 `[B, 1]`."""

    @abstractmethod
    def children(self, depth: int, handles: Tensor) -> Children:
        """The best children of nodes of one level.

        Levels are asked for in order, each at most once.

        Args:
            depth: The children's depth, from 1 to `self.depth`.
            handles: int64 `[B, F]`, from `root` or from the call for the level above. What is answered
                for -1 has no meaning.

        Returns:
            Their children.
        """


def usable(log_probs: Tensor) -> Tensor:
    """Log-probabilities that a tree can be built of, whatever a drafter gives.

    A rounded probability can exceed 1, and no child may outweigh its parent; a number that is none (an
    overflow in a drafter's low precision) is no child.

    Args:
        log_probs: float32 of any shape.

    Returns:
        The same, at most 0.
    """
    return log_probs.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).clamp(max=0)


@attrs.frozen(eq=False)
class TableProposal(Proposal):
    """Answers from transitions refined beforehand. A handle is the index of a context.

    Attributes:
        anchor: int64 `[B]`.
        transitions: The table.
    """

    anchor: Tensor
    transitions: Transitions

    @property
    def depth(self) -> int:
        """Levels of the table."""
        return self.transitions.token_ids.shape[1]

    @property
    def table(self) -> Transitions:
        """All that can be asked about: a CPU's selectors look here, and ask for no children."""
        return self.transitions

    def root(self) -> Tensor:
        """Context 0 of depth 1."""
        return torch.zeros_like(self.anchor)[:, None]

    def children(self, depth: int, handles: Tensor) -> Children:
        """Looks the contexts up."""
        rows = torch.arange(handles.shape[0], device=handles.device)[:, None]
        at = (rows, depth - 1, handles.clamp(min=0))
        table = self.transitions
        return Children(table.token_ids[at], table.log_probs[at], table.next_context[at])


@attrs.frozen(eq=False)
class FrontierProposal(Proposal):
    """Asks a refiner about just the contexts that are reached. A handle is the context itself.

    Attributes:
        recent: int64 `[B, 2]`: the token before the anchor, and the anchor.
        depth: Levels of the draft.
        history: Tokens of context, 0 to 2, packed into a handle.
        refine: From slots int64 `[F]` (depth - 1) and contexts int64 `[B, F, history]` to token ids
            and log-probabilities `[B, F, K]`.
    """

    recent: Tensor
    depth: int
    history: int
    refine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @property
    def anchor(self) -> Tensor:
        """Int64 `[B]`."""
        return self.recent[:, 1]

    def root(self) -> Tensor:
        """The last tokens decoded."""
        handle = torch.zeros_like(self.recent[:, :1])
        for back in range(2):
            handle = self._extend(handle, self.recent[:, back : back + 1])
        return handle

    def children(self, depth: int, handles: Tensor) -> Children:
        """Refines the contexts."""
        alive = handles.clamp(min=0)
        if self.history == 0:
            alive = alive[:, :1]  # all nodes of a level share one distribution
        mask = (1 << TOKEN_BITS) - 1
        shifts = [TOKEN_BITS * back for back in reversed(range(self.history))]
        tokens = [(alive >> shift) & mask for shift in shifts]
        contexts = torch.stack(tokens, dim=-1) if tokens else alive[..., None][..., :0]
        slots = torch.full((contexts.shape[1],), depth - 1, device=handles.device)
        token_ids, log_probs = self.refine(slots, contexts)
        wide = (-1, handles.shape[1], -1)
        token_ids, log_probs = token_ids.expand(wide), log_probs.expand(wide)
        below = self._extend(handles.clamp(min=0)[..., None], token_ids)
        return Children(token_ids, log_probs, below if depth < self.depth else torch.full_like(below, -1))

    def _extend(self, handles: Tensor, tokens: Tensor) -> Tensor:
        if self.history == 0:
            return torch.zeros_like(handles + tokens)
        if self.history == 1:
            return tokens.expand_as(handles + tokens)
        return ((handles & ((1 << TOKEN_BITS) - 1)) << TOKEN_BITS) | tokens
