"""How `cost-aware` learns from the steps of a text, on a clock that is simulated."""

import heapq
import math
import random
from functools import cache

import attrs
import pytest

from treeflash.components.selectors.cost_aware import CostAware
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.selectors.outcomes import Outcomes
from treeflash.costs import PassCosts
from treeflash.statistics import StepRecord
from treeflash.tree import TokenTree
from treeflash.types import Limits

NODES, LEVELS, TOKENS = 31, 7, 200
FIXED = (0, 4, 8, 15, 31)
# Milliseconds of a pass by its rows: how that grows differs from one processor and dtype to another.
COSTS = {
    "bfloat16 products": {1: 25, 2: 29, 5: 31, 8: 38, 16: 55, 32: 90},
    "float32": {1: 49, 2: 70, 4: 80, 8: 96, 16: 125, 32: 190},
    "a jump, then nearly flat": {1: 49, 2: 88, 8: 96, 16: 110, 32: 150},
    "emulated bfloat16": {1: 34, 2: 60, 4: 95, 8: 153, 16: 290, 32: 580},
    "flat": {1: 40, 32: 42},
}


def step(drafted, emitted, total=1.0, verify=0.75, **others):
    times = {"draft": total - verify, "verify": verify}
    return StepRecord(drafted, 3, emitted - 1, emitted, times, total, **{"tried": drafted > 0, **others})


def plain(total):
    return StepRecord(0, 0, 0, 1, {"verify": total}, total)


class TestOutcomes:
    costs = tuple(1 + 0.1 * nodes for nodes in range(40))

    def of(self, steps):
        return Outcomes.of(steps, self.costs)

    def test_without_a_draft_there_are_none(self):
        assert self.of([]) is None
        assert self.of([plain(1.0)] * 9) is None

    def test_a_draft_loses_its_time_less_what_it_brought(self):
        # A pass over ten nodes takes 2 s, a plain one 1 s.
        found = self.of([step(10, 2, total=2.5, verify=2.0)] * 3)
        assert found.loss == pytest.approx(2.5 - 2)
        assert found.error == pytest.approx(0.0)
        assert (found.drafts, found.largest, found.since) == (3, 10, 0)
        # Ten tokens in 10 s beforehand: a text is taken to grow as fast as plainly until it shows otherwise.
        brought, taken = (sum(value * 0.9**age for age in range(3)) for value in (2, 2.5))
        assert found.price == pytest.approx((10 + brought) / (10 + taken))

    def test_a_second_is_worth_what_the_text_grows_by(self):
        found = self.of([step(10, 5, total=2.5, verify=2.0)] * 200)
        # About ten drafts, of 5 tokens in 2.5 s each.
        assert found.price == pytest.approx((10 + 50) / (10 + 25), rel=0.05)

    def test_all_goes_by_the_present_pace(self):
        """Everything three times as slow as when passes were timed: the same decisions."""
        usual, slow = (
            self.of([step(10, 3, 2.5 * pace, 2.0 * pace), step(5, 4, 2 * pace, 1.5 * pace)])
            for pace in (1, 3)
        )
        for name in ("price", "loss", "error", "trust"):
            assert getattr(slow, name) == pytest.approx(getattr(usual, name))

    def test_plain_steps_say_themselves_what_they_take(self):
        """Not the timing, which may have met another pace; one or two of them say little."""
        drafts = [step(10, 2, total=2.5, verify=2.0)]
        assert self.of([*[plain(2.0)] * 2, *drafts]).loss == pytest.approx(2.5 - 2)
        assert self.of([*[plain(2.0)] * 3, *drafts]).loss == pytest.approx(2.5 / 2 - 2)
        # What they took long ago says nothing of now.
        assert self.of([*[plain(2.0)] * 3, *drafts * 300]).loss == pytest.approx(2.5 - 2)

    def test_a_slow_moment_counts_for_nothing(self):
        usual = [step(10, 2, total=2.5, verify=2.0)] * 5
        hindered = [*usual[:2], step(10, 2, total=90.0, verify=50.0), *usual[:2]]
        assert self.of(hindered) == self.of(usual)

    def test_without_times_of_stages_passes_take_what_was_timed(self):
        """As on a GPU."""
        found = self.of([StepRecord(10, 3, 1, 2, {}, 2.5, tried=True)] * 3)
        assert found.loss == pytest.approx(2.5 - 2)

    def test_weights_count_as_far_as_they_have_come_true(self):
        told = step(9, 3, expected=3.0)
        assert self.of([told]).trust == pytest.approx((5 + 2) / (5 + 3.0))
        both = self.of([told, step(9, 3, expected=4.0)])
        assert both.trust == pytest.approx((5 + 2 + 0.97 * 2) / (5 + 4.0 + 0.97 * 3.0))
        silent = step(9, 3)
        faded = self.of([told, silent, silent])
        assert faded.trust == pytest.approx((5 + 0.97**2 * 2) / (5 + 0.97**2 * 3.0))
        assert self.of([silent]).trust == 1.0

    def test_trust_comes_back_where_nothing_is_drafted(self):
        lost = [step(9, 1, expected=6.0)] * 20
        empty = step(0, 1, expected=0.0, tried=True)
        assert self.of(lost).trust < 0.1
        assert self.of([*lost, *[empty] * 100]).trust > 0.5


@attrs.frozen
class Drafts(OptTree):
    """Gives out recorded weights, the heaviest first, in place of a tree found in a proposal."""

    def select(self, proposal, limits):
        weights = [math.log(weight) for weight in proposal[: limits.nodes]]
        return TokenTree.from_lists([0] * (len(weights) + 1), range(-1, len(weights)), [0.0, *weights])


@cache
def drafts(sure, truth):
    """At each position of a text the weights of the heaviest nodes, and which of these the text goes through.

    Each node has three children of which the first has probability `sure`, as the drafter has it, and
    `sure * truth` in truth.
    """

    def children(first):
        return [first, 0.5 * (1 - first), 0.25 * (1 - first)]

    generator, text = random.Random(1), []
    for _ in range(TOKENS):
        mood = min(0.97, max(0.05, generator.gauss(sure, 0.2)))
        heap, weights, found = [(-1.0, 0, ())], [], {}
        while len(found) <= NODES:
            weight, _, path = heapq.heappop(heap)
            found[path] = len(found)
            weights.append(-weight)
            for child, share in enumerate(children(mood)) if len(path) < LEVELS else ():
                heapq.heappush(heap, (weight * share, len(heap) + 1000 * len(found), (*path, child)))
        accepted, path = [], ()
        while path in found:
            accepted.append(found[path])
            path += tuple(generator.choices(range(4), [*children(mood * truth), 0.25 * (1 - mood * truth)]))
        text.append((weights[1:], accepted[1:]))
    return text


def tokens_a_second(text, costs, overhead, choose, plain_dearer):
    """Decodes a text on a simulated clock that runs unevenly in the records of steps alone.

    Args:
        text: From `drafts`.
        costs: Seconds of a pass over 0, 1, ... nodes.
        overhead: Of drafting.
        choose: Given the steps so far and the weights, the number of nodes; None not to draft.
        plain_dearer: How much longer a plain step takes than was timed.
    """
    noise = random.Random(5)
    position, steps, taken = 0, [], 0.0
    while position < len(text):
        weights, path = text[position]
        nodes = choose(steps, weights)
        emitted = min(1 + sum(node <= (nodes or 0) for node in path), len(text) - position)
        verify = costs[nodes or 0] * (1 if nodes else plain_dearer)
        total = verify + (0.002 if nodes is None else overhead)
        taken += total
        # Now and then the machine does something else.
        pace, other = noise.lognormvariate(0, 0.1), 0.3 * (noise.random() < 0.03)
        record = step(
            nodes or 0, emitted, total * pace + other, verify * pace + other, tried=nodes is not None
        )
        steps.append(attrs.evolve(record, expected=sum(weights[: nodes or 0])))
        position += emitted
    return len(text) / taken


def by_cost(costs):
    selector = CostAware(costs, Drafts(NODES))

    def choose(steps, weights):
        limits = selector.plan(steps, Limits(NODES, LEVELS, 64))
        return selector.select(weights, limits).size - 1 if limits.allow_drafting else None

    return choose


@pytest.mark.parametrize(("overhead", "plain_dearer"), [(0.008, 1.3), (0.03, 1.0)])
@pytest.mark.parametrize("name", COSTS)
def test_it_is_nearly_as_fast_as_the_best_fixed_size_whatever_passes_cost(name, overhead, plain_dearer):
    costs = PassCosts(list(COSTS[name]), [64], [[value / 1000 for value in COSTS[name].values()]])
    ratios = []
    # How sure the drafter is, and how right where it is.
    for text in (drafts(0.9, 1.0), drafts(0.7, 1.1), drafts(0.6, 0.9), drafts(0.4, 0.7)):

        def speed(choose, text=text):
            return tokens_a_second(text, costs.up_to(NODES, 64), overhead, choose, plain_dearer)

        fixed = [speed(lambda steps, weights, size=size: size or None) for size in FIXED]
        ratios.append(speed(by_cost(costs)) / max(fixed))
    assert min(ratios) > 0.9
    assert sum(ratios) / len(ratios) > 0.97
