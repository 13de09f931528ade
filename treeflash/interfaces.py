"""The five parts of a tree decoder.

A part is an attrs class whose fields are its options. One that needs more than its options (weights,
say) gives an options class of its own and `from_options`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import attrs
import torch
from torch import Tensor

from treeflash.errors import CompositionError, InputError, bullet_list
from treeflash.proposal import TOKEN_BITS, FrontierProposal, Proposal, TableProposal
from treeflash.returned import spell_value
from treeflash.sampling import Draws
from treeflash.statistics import StepRecord
from treeflash.structuring import field_faults
from treeflash.target_interface import Target
from treeflash.tree import TokenTree, trims
from treeflash.types import (
    Acceptance,
    BlockDraft,
    DecodeState,
    Lattice,
    Limits,
    OnDemand,
    Transitions,
)


@attrs.frozen
class BuildContext:
    """What a component may need while it is built from a recipe.

    Attributes:
        target: The target it will work for.
        locate: Turns a name, package path or relative path of the recipe into a folder on disk.
        drafter_checkpoint: The drafter's checkpoint, as the recipe names it; None without one.
        find_model: Turns what the recipe gives as `model` into a folder or a hub name, as it does for the
            target.
        progress: Told what takes long while it is built: a name for it, how much is done and how much there
            is.
        by_clock: Whether it may go by time; false where steps are simulated and take none.
    """

    target: Target
    locate: Callable[[str], Path]
    drafter_checkpoint: str | None = None
    find_model: Callable[[str], str | Path] = str
    progress: Callable[[str, int, int], None] = lambda task, done, total: None
    by_clock: bool = True


class Component:
    """What all five kinds share.

    Attributes:
        Options: The frozen attrs class of the keys a recipe may give; None when that is the component
            class itself.
    """

    Options: ClassVar[type | None] = None

    def __attrs_pre_init__(self, *values: Any, **more: Any) -> None:
        """Refuses options of the wrong type or out of range, as a recipe does.

        Args:
            *values: Of the fields, as attrs passes them.
            **more: Of those given by name alone.

        Raises:
            InputError: Listing every fault.
        """
        fields = [field for field in attrs.fields(cast(Any, type(self))) if field.init]
        given = dict(zip((field.name for field in fields if not field.kw_only), values, strict=True))
        given |= {field.name: more[field.alias] for field in fields if field.kw_only}
        said = {name: value for name, value in given.items() if value is not attrs.NOTHING}
        faults = field_faults(said, type(self))
        if faults:
            raise InputError(bullet_list(type(self).__name__, faults))

    @classmethod
    def options_class(cls) -> type:
        """The attrs class that a recipe's table is structured into."""
        return cls if cls.Options is None else cls.Options

    @classmethod
    def from_options(cls, options: Any, context: BuildContext) -> Self:
        """Builds the component.

        Args:
            options: An instance of `options_class()`.
            context: What else there is.

        Returns:
            The component; `options` itself when they are the same class.
        """
        if not isinstance(options, cls):
            raise TypeError(f"{cls.__name__} has Options but no from_options to build from them")
        return options


class Drafter(Component, ABC):
    """Guesses how a text goes on.

    Attributes:
        tap_layers: Target layers whose outputs `extend` wants, 0-based; the last layer's is taken
            behind the target's final norm.
        max_depth: Levels it can draft; a drafter says so, by a class attribute, a field or a property.
        drafts_blocks: Whether `propose` gives a `BlockDraft` for a builder and a refiner; otherwise it
            gives a `Proposal`, and neither may stand behind it.
    """

    tap_layers: tuple[int, ...] = ()
    max_depth: int
    drafts_blocks: ClassVar[bool] = True

    def bind(self, target: Target) -> None:
        """Meets the target it will draft for; called by each decoder it is part of.

        Args:
            target: The target.

        Raises:
            CheckpointError: When it was made for another target.
        """

    @abstractmethod
    def start(self, batch_size: int, capacity: int) -> Any:
        """Makes the state of new sequences.

        Args:
            batch_size: B.
            capacity: Positions a sequence can grow to, drafts included. A bound that most texts stay far
                below: make room as they come (`treeflash.room`).

        Returns:
            Whatever the drafter needs to remember of its sequences.

        Raises:
            InputError: For more rows than it can draft for.
        """

    @abstractmethod
    def extend(self, state: Any, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """Learns what was decoded since the last call.

        Args:
            state: From `start`.
            token_ids: int64 `[B, n]`: the tokens now in the target's cache and not before.
            taps: `[B, n, F]`: the target's tapped states at those positions; None when it taps none.
            counts: int64 `[B]` on the CPU: how many of the n are each row's; what lies behind is padding.
        """

    @abstractmethod
    def rewind(self, state: Any, lengths: Tensor) -> None:
        """Forgets the last positions.

        Args:
            state: From `start`.
            lengths: int64 `[B]` on the CPU: positions to keep of each row.
        """

    @abstractmethod
    def propose(self, state: Any, recent: Tensor, limits: Limits) -> BlockDraft | Proposal:
        """Drafts what may follow.

        Args:
            state: From `start`; left as it is, but for scratch room.
            recent: int64 `[B, 2]`: the token before the anchor, and the anchor.
            limits: What can be used; nodes and depth are at least 1.

        Returns:
            A draft of at most `limits.depth` levels.
        """


class TreeBuilder(Component, ABC):
    """Stage 1: decides which contexts a refiner is asked about.

    Attributes:
        min_history: Tokens of context it lays out at least; a refiner that looks at fewer does not fit.
        max_history: Tokens of context it can lay out: how far back a refiner may look.
    """

    min_history: ClassVar[int] = 0
    max_history: ClassVar[int] = 2

    @abstractmethod
    def build(self, draft: BlockDraft, history: int, limits: Limits) -> Lattice | OnDemand:
        """Lays out contexts.

        Args:
            draft: The backbone's draft.
            history: Tokens of context the refiner looks at, from `min_history` to `max_history`.
            limits: What can be used of the tree.

        Returns:
            The contexts, or that they are to be made on demand.
        """


class Refiner(Component, ABC):
    """Stage 2: the distribution of a position given the token or tokens before it.

    Attributes:
        history: Tokens of context it looks at: 0, 1 or 2.
        candidates: Of each position's likeliest tokens, how many it scores anew, where it does not score all;
            the others share what these leave, in the proportions of the backbone's own distribution.
    """

    history: ClassVar[int] = 1
    candidates: int | None = None

    def bind(self, target: Target) -> None:
        """Meets the target whose drafts it will refine; called by each decoder it is part of.

        Args:
            target: The target.

        Raises:
            CheckpointError: When it was made for another target.
        """

    @abstractmethod
    def children(self, draft: BlockDraft, slots: Tensor, previous: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The best next tokens of some contexts, all in one pass.

        Args:
            draft: The backbone's draft.
            slots: int64 `[F]`: each context's index along the draft's positions: the children's
                depth - 1.
            previous: int64 `[B, F, history]`: the tokens before those children.
            k: How many children; more than the vocabulary gives the vocabulary.

        Returns:
            `token_ids` int64 and `log_probs` float32, `[B, F, k]`, by falling probability.
        """

    def refine(self, draft: BlockDraft, lattice: Lattice | OnDemand) -> Proposal:
        """Makes a draft explorable.

        Args:
            draft: The backbone's draft.
            lattice: The contexts to refine, all in one pass, or that they come on demand.

        Returns:
            The refined draft.
        """
        if isinstance(lattice, OnDemand):
            k = lattice.children
            return FrontierProposal(
                recent=draft.recent,
                depth=draft.depth,
                history=self.history,
                refine=lambda slots, previous: self._children(draft, slots, previous, k),
            )
        return TableProposal(draft.recent[:, 1], self.transitions(draft, lattice))

    def transitions(self, draft: BlockDraft, lattice: Lattice) -> Transitions:
        """Stage 2: the best children of every context of a lattice.

        Args:
            draft: The backbone's draft.
            lattice: Its contexts, `[B, P, C, H]`.

        Returns:
            `[B, P, C, K]` of each. Depth 1 has one context, evaluated once; what stands at other places that
            hold none is never asked for.
        """
        contexts = lattice.contexts
        batch, depth, width, history = contexts.shape
        flat = contexts.reshape(batch, depth * width, history)
        if trims(contexts.device):
            places = lattice.is_context.flatten(1).any(dim=0).nonzero()[:, 0]
        else:
            # Asking a GPU which places are contexts would be a transfer; but depth 1 has just one.
            places = torch.arange(width - 1, depth * width, device=contexts.device)
            places[:1] = 0
        ids, log_probs = self._children(draft, places // width, flat[:, places], lattice.children)

        def spread(rows: Tensor) -> Tensor:
            whole = rows.new_zeros(batch, depth * width, rows.shape[2])
            whole[:, places] = rows
            whole[:, 1:width] = rows[:, :1]
            return whole.view(batch, depth, width, -1)

        token_ids, log_probs = spread(ids), spread(log_probs)
        return Transitions(token_ids, log_probs, _next_contexts(lattice, token_ids))

    def _children(self, draft: BlockDraft, slots: Tensor, previous: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """What `children` returns, which has to be two tensors."""
        found = self.children(draft, slots, previous, k)
        if isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, Tensor) for part in found):
            return found
        of = f" of {', '.join(type(part).__name__ for part in found)}" if isinstance(found, tuple) else ""
        raise CompositionError(
            f"refiner {type(self).__name__}: children returned {spell_value(found)}{of}, expected a tuple of "
            "two tensors, token_ids and log_probs"
        )


def _next_contexts(lattice: Lattice, token_ids: Tensor) -> Tensor:
    """Finds each child's own context one level down: the one that ends in the same tokens."""
    contexts, history = lattice.contexts, lattice.contexts.shape[-1]
    following = torch.full_like(token_ids, -1)
    if contexts.shape[1] == 1:
        return following
    children = token_ids[:, :-1, :, :, None]
    kept = contexts[:, :-1, :, None, 1:].expand(*children.shape[:-1], -1)
    reached = _packed(torch.cat([kept, children], dim=-1)[..., :history]).flatten(2)
    # Looked up in order, since comparing all with all takes a table of children by contexts.
    wanted = _packed(contexts[:, 1:]).masked_fill(~lattice.is_context[:, 1:], -1)
    ordered, order = wanted.sort(dim=2, stable=True)
    place = torch.searchsorted(ordered, reached).clamp(max=ordered.shape[2] - 1)
    index = order.gather(2, place).masked_fill(ordered.gather(2, place) != reached, -1)
    following[:, :-1] = index.view_as(following[:, :-1])
    return following


def _packed(contexts: Tensor) -> Tensor:
    """Contexts of up to two tokens, int64 `[..., H]`, as a number each, int64 `[...]`."""
    numbers = contexts.new_zeros(contexts.shape[:-1])
    for tokens in contexts.unbind(-1):
        numbers = numbers << TOKEN_BITS | tokens
    return numbers


class Selector(Component, ABC):
    """Chooses the tree worth verifying."""

    def plan(self, steps: Sequence[StepRecord], limits: Limits) -> Limits:
        """Decides how much to draft, before anything is drafted; without a plan of its own, all there is.

        Args:
            steps: What happened so far in this sequence. The first call of all, before there is anything
                to draft from, has none and makes the room: later answers are cut to its nodes.
            limits: What can be used at all.

        Returns:
            Limits no larger; with no nodes or no depth nothing is drafted.
        """
        return limits

    def without_clock(self) -> "Selector":
        """What stands for it in simulations, where steps take no time: itself, unless it goes by time."""
        return self

    @abstractmethod
    def select(self, proposal: Proposal, limits: Limits) -> TokenTree:
        """Explores a proposal and keeps a tree of it.

        Args:
            proposal: The draft.
            limits: As planned.

        Returns:
            A tree of at most `limits.nodes` nodes below the root and `limits.depth` levels.
        """


class Verifier(Component, ABC):
    """Finds the longest path of a tree that the target itself would have written.

    Attributes:
        lossless: Whether texts are the target's own; false for one that gives that up on purpose, as typical
            acceptance does. Audits and the tests of exact text then leave it out, `bench` labels its arm, and
            `eval`, which measures along the target's own texts, refuses it.
    """

    lossless: ClassVar[bool] = True

    @abstractmethod
    def verify(self, target: Target, state: DecodeState, tree: TokenTree, draws: Draws) -> Acceptance:
        """Checks a tree in one pass of the target.

        Args:
            target: The target.
            state: Its `target` state is left with the tree's rows behind the committed ones.
            tree: The tree, rooted at the anchor.
            draws: How the target chooses.

        Returns:
            What was accepted.
        """


# The interface of each part of a decoder, by the name of the part.
INTERFACES: Mapping[str, type[Any]] = {
    "drafter": Drafter,
    "builder": TreeBuilder,
    "refiner": Refiner,
    "selector": Selector,
    "verifier": Verifier,
}
