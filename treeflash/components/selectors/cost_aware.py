"""The tree with the most expected tokens a second: as many nodes as are worth what they cost."""

import logging
import math
from collections.abc import Sequence
from functools import partial

import attrs
import torch
from attrs.validators import and_, ge, le, optional

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.selectors.outcomes import Outcomes
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
# Drafts before the first pause: fewer say nothing.
_FEWEST_DRAFTS = 4
# Standard errors by which they must have lost: a pause for nothing is dear, too.
_DOUBT = 0.5
# Share of the time that drafts which do not pay may cost. They are tried again that seldom, and no more so.
_TRIALS = 0.05
_LONGEST_PAUSE = 32


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
    """Limits of a step, and what to weigh its nodes by.

    Attributes:
        price: Tokens that a second of the target's pass is worth; None for what plain decoding writes in it.
        trust: Draft tokens lately accepted by those that weights promised: what to multiply weights by.
    """

    price: float | None = None
    trust: float = 1.0


@attrs.frozen
class CostAware(Selector):
    """Takes the heaviest nodes for as long as one more is worth its share of the target's pass.

    A step over the n heaviest nodes is expected to emit the sum of their weights, the root's own 1 for the
    bonus token among them. A second of its pass is worth as many tokens as the text lately grew by in a
    second, and the n of the greatest difference is taken: that makes the whole text fastest. (A step's own
    ratio would not: it stops too soon where the draft is sure, and too late where it is not.)

    A drafter is surer of itself in texts unlike those it learned from than it should be, and less sure in
    others: weights count as far as they have lately come true in this text. Where drafts lose time, they are
    tried as seldom as keeps that to a twentieth of the time.

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
        """Decides whether to draft; if so, about twice as much as was worth it lately at most."""
        limits = self.tree.plan(steps, limits)
        found = Outcomes.of(steps, self.costs.up_to(self.tree.budget, limits.length))
        if found is None:
            return PricedLimits(limits.nodes, limits.depth, limits.length)
        if found.since < _pause(found):
            return Limits(0, 0, limits.length)
        nodes = min(limits.nodes, 8 + 2 * found.largest)
        return PricedLimits(nodes, limits.depth, limits.length, found.price, found.trust)

    def without_clock(self) -> OptTree:
        """The heaviest nodes up to the most, whatever they cost."""
        return self.tree

    def select(self, proposal: Proposal, limits: Limits) -> TokenTree:
        """Finds the heaviest nodes, then cuts behind the last that is worth it."""
        tree = self.tree.select(proposal, limits)
        costs = torch.tensor(self.costs.up_to(tree.size - 1, limits.length), device=tree.log_weights.device)
        price, trust = None, 1.0
        if isinstance(limits, PricedLimits):
            price, trust = limits.price, limits.trust
        # Nodes stand by falling weight, the root with its bonus token first. An empty slot has none.
        weights = tree.log_weights.exp()
        weights[:, 1:] *= trust
        emitted = weights.cumsum(dim=1).sum(dim=0)
        worth = costs / costs[0] if price is None else costs * price
        return tree.first(int((emitted - worth).argmax()) + 1)


def _pause(found: Outcomes) -> int:
    """Steps without a draft after one, so that what drafts lose stays a small share of the time."""
    loss = found.loss - _DOUBT * found.error
    if found.drafts < _FEWEST_DRAFTS or loss <= 0:
        return 0
    return min(_LONGEST_PAUSE, math.ceil(loss / _TRIALS))
