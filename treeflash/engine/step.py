"""One speculative step, from a state to the tokens it adds."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from treeflash.engine.stopwatch import Stopwatch
from treeflash.errors import CompositionError
from treeflash.interfaces import Drafter, Refiner, Selector, TreeBuilder, Verifier
from treeflash.proposal import Proposal
from treeflash.returned import returned
from treeflash.sampling import Draws
from treeflash.statistics import StepRecord
from treeflash.target_interface import Target
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, BlockDraft, DecodeState, Lattice, Limits, OnDemand


class Parts(Protocol):
    """The parts that a step is made of."""

    target: Target
    drafter: Drafter
    builder: TreeBuilder | None
    refiner: Refiner | None
    selector: Selector
    verifier: Verifier


@torch.inference_mode()
def speculate(
    parts: Parts,
    state: DecodeState,
    draws: Draws,
    steps: Sequence[StepRecord],
    limits: Limits,
    watch: Stopwatch,
) -> tuple[TokenTree, Acceptance, bool]:
    """Drafts a tree and verifies it.

    Args:
        parts: What to use.
        state: Where the sequences stand; the committed part of it is left as it is.
        draws: How the target chooses.
        steps: What happened so far.
        limits: What the step can use at most.
        watch: Measures the stages.

    Returns:
        The tree, what the target accepted of it, and whether anything was drafted for it.

    Raises:
        CompositionError: When a part returns something else than its interface promises.
    """
    limits = planned(parts.selector, steps, limits)
    tree = TokenTree.root_only(state.anchor)
    if limits.allow_drafting:
        draft = proposed(parts.drafter, state.drafter, state.recent, limits)
        watch.lap("draft")
        if isinstance(draft, BlockDraft):
            assert parts.builder is not None, "checked when composed"
            assert parts.refiner is not None, "checked when composed"
            lattice = parts.builder.build(draft, parts.refiner.history, limits)
            returned(parts.builder, "builder", "build", lattice, Lattice, OnDemand)
            watch.lap("build")
            draft = parts.refiner.refine(draft, lattice)
            returned(parts.refiner, "refiner", "refine", draft, Proposal)
            watch.lap("refine")
        tree = parts.selector.select(draft, limits)
        returned(parts.selector, "selector", "select", tree, TokenTree)
        # How many of its slots are nodes is not known on the host; empty ones do no harm.
        _check_within(parts.selector, "select", 0, tree.max_depth, limits)
        watch.lap("select")
    acceptance = parts.verifier.verify(parts.target, state, tree, draws)
    returned(parts.verifier, "verifier", "verify", acceptance, Acceptance)
    watch.lap("verify")
    return tree, acceptance, limits.allow_drafting


def planned(selector: Selector, steps: Sequence[StepRecord], limits: Limits) -> Limits:
    """Asks a selector how much to draft.

    Args:
        selector: The selector.
        steps: What happened so far.
        limits: What can be used.

    Returns:
        Its plan.

    Raises:
        CompositionError: When it returns something else, or more than can be used.
    """
    plan: Limits = returned(selector, "selector", "plan", selector.plan(steps, limits), Limits)
    _check_within(selector, "plan", plan.nodes, plan.depth, limits)
    return plan


def _check_within(selector: Selector, method: str, nodes: int, depth: int, limits: Limits) -> None:
    """Refuses more than can be used: a node past the target's last position would change the text."""
    if nodes > limits.nodes or depth > limits.depth:
        raise CompositionError(
            f"selector {type(selector).__name__}: {method} returned {depth} levels and {nodes} nodes, "
            f"expected at most the {limits.depth} levels and {limits.nodes} nodes of its limits"
        )


def proposed(drafter: Drafter, state: Any, recent: Tensor, limits: Limits) -> BlockDraft | Proposal:
    """Asks a drafter for a draft.

    Args:
        drafter: The drafter.
        state: Its own state.
        recent: int64 `[B, 2]`: the token before the anchor, and the anchor.
        limits: What can be used.

    Returns:
        A `BlockDraft` when its `drafts_blocks` is true, otherwise a `Proposal`.

    Raises:
        CompositionError: When it returns something else.
    """
    blocks = drafter.drafts_blocks
    draft: BlockDraft | Proposal = returned(
        drafter,
        "drafter",
        "propose",
        drafter.propose(state, recent, limits),
        BlockDraft if blocks else Proposal,
        why=f", because its drafts_blocks is {str(blocks).lower()}",
    )
    return draft


@torch.inference_mode()
def commit(parts: Parts, state: DecodeState, acceptance: Acceptance, watch: Stopwatch) -> None:
    """Makes the accepted path part of the state.

    Args:
        parts: What is used.
        state: Where the sequences stand; moved on.
        acceptance: From `speculate`.
        watch: Measures the stage.
    """
    parts.target.commit(state.target, acceptance.paths)
    # In the cache now: the anchor and the accepted tokens. The last token chosen is the new anchor.
    counts = torch.tensor([len(path) for path in acceptance.paths])
    longest = int(counts.max())
    rows = [row + [0] * (longest - len(row)) for row in acceptance.tokens]
    chosen = torch.tensor(rows).to(state.recent.device, non_blocking=True)
    grown = torch.cat([state.anchor[:, None], chosen], dim=1)
    parts.drafter.extend(state.drafter, grown[:, :-1], acceptance.taps, counts)
    last = (counts[:, None] + torch.tensor([-1, 0])).to(grown.device, non_blocking=True)
    state.recent = grown.gather(1, last)
    state.lengths = state.lengths + counts
    watch.lap("commit")
