"""The tree with the most expected tokens a second: as many nodes as are worth what they cost."""

import logging
from collections.abc import Sequence
from functools import partial

import attrs
import torch
from attrs.validators import and_, ge, le, optional

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.costs import PassCosts
from treeflash.interfaces import BuildContext, Selector
from treeflash.proposal import Proposal
from treeflash.ranges import MOST_NODES
from treeflash.statistics import StepRecord
from treeflash.tree import TokenTree
from treeflash.types import Limits

_log = logging.getLogger(__name__)
# Nodes of a tree where costs are not known: few enough to be cheap on most machines.
_FALLBACK = 8
# Steps that are looked back at: enough to tell a text's mood, few enough to follow it.
_RECENT = 16
# Steps without a draft after drafts that did not pay, before one is tried again.
_PAUSE = 8
# What drafts must cost more than they bring: a few steps say little, and a pause for nothing is dear.
_MARGIN = 1.1
# Draft tokens accepted as promised that a text is credited with before it has shown any.
_CREDIT = 5.0
# What a draft says of the next, if the one behind it says 1: some thirty are looked back at.
_FADING = 0.97


@attrs.frozen
class CostAwareOptions:
    """What a recipe says of the selector.

    Attributes:
        most: Draft nodes at most, the root excluded.
        depth: Levels drafted at most; as many as the drafter gives when not set.
        beam: Nodes of a level whose children are looked at; all that can enter the tree when not set.
        refresh: Measure the target's passes again, though what they cost on this hardware is known.
    """

    most: int = attrs.field(default=127, validator=and_(ge(1), le(MOST_NODES)))
    depth: int | None = attrs.field(default=None, validator=optional(ge(1)))
    beam: int | None = attrs.field(default=None, validator=optional(ge(1)))
    refresh: bool = False


@attrs.frozen
class PricedLimits(Limits):
    """Limits of a step, and what it costs beside the target's pass.

    Attributes:
        overhead: In seconds as the passes were measured, whatever the machine's pace is now.
        trust: Draft tokens lately accepted by those that weights promised: what to multiply weights by.
    """

    overhead: float = 0.0
    trust: float = 1.0


@attrs.frozen
class CostAware(Selector):
    """Takes the heaviest nodes for as long as one more is worth its share of the target's pass.

    A step over the n heaviest nodes is expected to emit the sum of their weights, the root's own 1 for the
    bonus token among them, and takes the time of a pass over n nodes and of everything around it. The n of
    the greatest ratio is taken, anew in each step. A drafter is surer of itself in texts unlike those it
    learned from than it should be, and less sure in others: weights count as far as they have lately come
    true in this text. Where drafts have not paid for themselves lately, nothing is drafted for some steps.

    It goes by the clock, so that two runs may choose other trees: in low precision, where trees round
    differently, nearly tied tokens may then fall differently too.

    Attributes:
        costs: What the target's passes cost.
        tree: Finds the heaviest nodes.
    """

    Options = CostAwareOptions

    costs: PassCosts
    tree: OptTree

    @classmethod
    def from_options(cls, options: CostAwareOptions, context: BuildContext) -> Selector:  # type: ignore[override]
        """Times the target's passes, or reads what was timed; without a clock, takes the heaviest nodes."""
        tree = OptTree(options.most, options.depth, options.beam)
        if not context.by_clock:
            return tree
        costs = PassCosts.of_target(
            context.target,
            options.most + 1,
            refresh=options.refresh,
            progress=partial(context.progress, "timing passes, once per machine"),
        )
        if costs is not None:
            return cls(costs, tree)
        _log.warning(
            "cost-aware: the target's passes are too slow to be timed now; trees of %d nodes are drafted "
            "instead",
            min(_FALLBACK, options.most),
        )
        return attrs.evolve(tree, budget=min(_FALLBACK, options.most))

    def plan(self, steps: Sequence[StepRecord], limits: Limits) -> Limits:
        """Decides whether to draft; if so, no more than twice what was worth it lately."""
        limits = self.tree.plan(steps, limits)
        since = next((back for back, step in enumerate(reversed(steps)) if step.tried), len(steps))
        # As far back as the last sixteen drafts can lie, with a pause behind each.
        tried = [step for step in steps[-_RECENT * (_PAUSE + 1) :] if step.tried]
        drafted = tried[-_RECENT:]
        if not drafted:
            return PricedLimits(limits.nodes, limits.depth, limits.length)
        largest = max(step.num_drafted for step in drafted)
        costs = self.costs.up_to(largest, limits.length)
        expected = sum(costs[step.num_drafted] for step in drafted)
        total = sum(step.total for step in drafted)
        passes = sum(step.seconds.get("verify", expected / len(drafted)) for step in drafted)
        # The machine may be slower or faster than when it was measured: times go by its present pace.
        pace = passes / expected
        plain = sum(step.num_emitted for step in drafted) * costs[0] * pace
        if len(drafted) == _RECENT and since < _PAUSE and _MARGIN * plain < total:
            return Limits(0, 0, limits.length)
        overhead = max(0.0, total - passes) / pace / len(drafted)
        nodes = min(limits.nodes, 8 + 2 * largest)
        return PricedLimits(nodes, limits.depth, limits.length, overhead, _trust(tried))

    def without_clock(self) -> OptTree:
        """The heaviest nodes up to the most, whatever they cost."""
        return self.tree

    def select(self, proposal: Proposal, limits: Limits) -> TokenTree:
        """Finds the heaviest nodes, then cuts behind the last that is worth it."""
        tree = self.tree.select(proposal, limits)
        costs = torch.tensor(self.costs.up_to(tree.size - 1, limits.length), device=tree.log_weights.device)
        if not isinstance(limits, PricedLimits):
            limits = PricedLimits(limits.nodes, limits.depth, limits.length)
        # Nodes stand by falling weight, the root with its bonus token first. An empty slot has none.
        weights = tree.log_weights.exp()
        weights[:, 1:] *= limits.trust
        emitted = weights.cumsum(dim=1).sum(dim=0)
        best = int((emitted / (costs + limits.overhead)).argmax())
        return tree.first(best + 1)


def _trust(steps: Sequence[StepRecord]) -> float:
    """How far weights have come true; drafts cut to nothing say nothing, but let the others fade."""
    accepted = expected = 0.0
    for step in steps:
        accepted, expected = accepted * _FADING, expected * _FADING
        if step.expected is not None:
            accepted, expected = accepted + step.num_accepted, expected + step.expected
    return (_CREDIT + accepted) / (_CREDIT + expected)
