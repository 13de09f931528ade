"""As many nodes as are worth what they cost, and what a pass costs."""

import json
import time

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.components.selectors.cost_aware import CostAware, CostAwareOptions, PricedLimits
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.selectors.outcomes import Outcomes
from treeflash.costs import PassCosts
from treeflash.interfaces import BuildContext
from treeflash.plugins import Registry
from treeflash.proposal import TableProposal
from treeflash.recipe import Recipe
from treeflash.statistics import StepRecord
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.types import Limits

from .test_selectors import tables

FLAT = PassCosts([1, 128], [64], [[1.0, 1.0]])


def step(drafted, emitted, total=1.0, verify=0.75):
    times = {"draft": total - verify, "verify": verify}
    return StepRecord(drafted, 3, emitted - 1, emitted, times, total, tried=drafted > 0)


def proposal(table):
    return TableProposal(torch.tensor([0]), table)


@given(
    table=tables(),
    seed=st.integers(0, 1000),
    price=st.sampled_from([None, 0.01, 0.1, 1.0]),
    trust=st.sampled_from([0.3, 1.0, 1.2]),
)
def test_the_most_expected_tokens_over_what_the_pass_could_bring_elsewhere(table, seed, price, trust):
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.rand(30, generator=generator).cumsum(0).tolist()
    selector = CostAware(PassCosts(range(1, 31), [64], [seconds]), OptTree(29))
    draft, limits = proposal(table), PricedLimits(29, 3, 64, price, trust)
    whole, found = OptTree(29).select(draft, limits), selector.select(draft, limits)
    weights = whole.log_weights[0].exp().double()
    # At first as plain decoding goes: a token in a pass over the root alone.
    price = 1 / seconds[0] if price is None else price
    gains = [1 + trust * float(weights[1:n].sum()) - price * seconds[n - 1] for n in range(1, whole.size + 1)]
    assert gains[found.size - 1] == pytest.approx(max(gains), abs=1e-5 * price * seconds[-1] + 1e-5)
    assert found.token_ids.tolist() == whole.first(found.size).token_ids.tolist()


@given(table=tables())
def test_when_nodes_cost_nothing_all_are_taken_and_when_they_cost_much_none(table):
    draft, limits = proposal(table), Limits(20, 3, 64)
    whole = OptTree(20).select(draft, limits)
    assert CostAware(FLAT, OptTree(20)).select(draft, limits).size == whole.size
    steep = CostAware(PassCosts([1, 2], [64], [[1.0, 9.0]]), OptTree(20)).select(draft, limits)
    assert steep.size == 1


def test_costs_lie_on_lines_and_never_fall():
    costs = PassCosts([1, 3, 5], [10, 30], [[1.0, 3.0, 2.0], [3.0, 5.0, 9.0]])
    assert costs.up_to(4, 10) == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert costs.up_to(4, 20) == [2.0, 3.0, 4.0, 4.75, 5.5]
    assert costs.up_to(0, 50) == [5.0]
    # Beyond the grid lines go on, but not down to nothing.
    assert costs.up_to(6, 30)[-1] == 13.0
    assert PassCosts([1], [10, 30], [[4.0], [1.0]]).up_to(0, 1000) == [0.5]
    assert PassCosts([1], [10], [[4.0]]).up_to(2, 99) == [4.0] * 3


class TestPlan:
    limits = Limits(127, 7, 64)

    def plan(self, steps, costs=FLAT):
        return CostAware(costs, OptTree(127, depth=5)).plan(steps, self.limits)

    def test_at_first_there_is_no_price(self):
        first = self.plan([])
        assert (first.nodes, first.depth, first.length) == (127, 5, 64)
        assert (first.price, first.trust) == (None, 1.0)

    def test_what_steps_came_to_is_what_nodes_are_weighed_by(self):
        steps = [attrs.evolve(step(9, 3), expected=1.5), step(30, 3, total=1.5)]
        found, outcomes = self.plan(steps), Outcomes.of(steps, [1.0] * 128)
        assert (found.price, found.trust) == (outcomes.price, outcomes.trust)
        assert (found.nodes, found.depth) == (8 + 2 * 30, 5)

    def test_drafts_that_pay_are_not_paused(self):
        assert self.plan([step(9, 3, total=1.5)] * 20).nodes > 0

    def test_too_few_drafts_say_nothing(self):
        assert self.plan([step(9, 1, total=9.0)] * 3).nodes > 0
        assert self.plan([step(9, 1, total=9.0)] * 4).nodes == 0

    def test_drafts_whose_loss_may_be_chance_are_not_paused(self):
        # A plain step takes 1 s here, and these lose a twentieth of one on average.
        uneven = [step(9, 1, total=1.55, verify=1.0), step(9, 2, total=1.55, verify=1.0)]
        assert self.plan(uneven * 8).nodes > 0
        assert self.plan([step(9, 1, total=1.05, verify=1.0)] * 16).nodes == 0

    @pytest.mark.parametrize("drafted", [9, 0])
    @pytest.mark.parametrize(("loss", "pause"), [(0.12, 3), (0.52, 11), (3.0, 32)])
    def test_drafts_that_never_pay_cost_a_twentieth_of_the_time(self, drafted, loss, pause):
        """Those that come to nothing too; but they are not given up for good."""
        steps = []
        for _ in range(600):
            tried = self.plan(steps).nodes > 0
            record = step(drafted if tried else 0, 1, total=1 + loss if tried else 1.0, verify=1.0)
            steps.append(attrs.evolve(record, tried=tried))
        late = [step.tried for step in steps[99:]]
        assert sum(late) / len(late) == pytest.approx(1 / (1 + pause), rel=0.1)

    def test_drafts_that_pay_again_end_a_pause(self):
        steps = [step(9, 1, total=1.5, verify=1.0)] * 20
        assert self.plan(steps).nodes == 0
        steps += [step(9, 6, total=1.5, verify=1.0)] * 3
        assert self.plan(steps).nodes > 0


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    return tmp_path / "costs"


class Clock:
    """A machine on which passes take what they are told to, in seconds by their rows."""

    def __init__(self, target, monkeypatch):
        self.now, self.wall, self.pace, self.passes = 0.0, 1e9, {}, []
        verify = target.verify

        def timed(state, tree):
            self.passes.append(tree.size)
            self.now += 0.01 * tree.size * self.pace.get(tree.size, 1.0)
            return verify(state, tree)

        monkeypatch.setattr(target, "verify", timed)
        monkeypatch.setattr("treeflash.costs.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("treeflash.costs.time.time", lambda: self.wall)

    def times(self, target, rows, **settings):
        """Costs, and how many passes were timed for them."""
        before = len(self.passes)
        return PassCosts.of_target(target, rows, **settings), len(self.passes) - before


@pytest.fixture
def target():
    return wrap_model(tiny_model("llama"))


@pytest.fixture
def clock(target, monkeypatch):
    return Clock(target, monkeypatch)


def test_a_target_is_timed_once(cache, target, clock, monkeypatch):
    found, passes = clock.times(target, 20)
    assert passes == 2 * 2 * len(found.sizes)  # the second time agrees with the first
    assert (found.sizes, found.lengths) == (
        [1, 2, 4, 5, 6, 7, 8, 12, 16, 20],
        [64, 236],
    )  # where the target ends
    for row in found.seconds:
        assert row == pytest.approx([0.01 * size for size in found.sizes])
    assert clock.times(target, 20) == (found, 0)
    assert clock.times(target, 20, refresh=True)[1] == passes
    # Other sizes, another number of threads, or instructions that the processor does not use.
    for change in (lambda: None, lambda: ("get_num_threads", lambda: 77)):
        if change() is not None:
            monkeypatch.setattr(torch, *change())
        assert clock.times(target, 21)[1] > 0
    monkeypatch.setattr("treeflash.hardware.instructions", lambda: "AVX2")
    assert clock.times(target, 20)[1] > 0
    assert len(list(cache.iterdir())) == 4


def test_another_model_is_timed_by_itself(cache, target, clock):
    PassCosts.of_target(target, 4)
    PassCosts.of_target(wrap_model(tiny_model("llama", seed=1)), 4)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "held",
    ["", "[", "{}", '{"seconds": [[1]]}', '{"seconds": 3}', '{"seconds": [["x"]], "provisional_until": 0}'],
)
def test_a_damaged_file_is_timed_again(cache, target, clock, held):
    PassCosts.of_target(target, 4)
    (path,) = cache.iterdir()
    path.write_text(held)
    found, passes = clock.times(target, 4)
    assert passes > 0
    assert json.loads(path.read_text())["seconds"] == found.seconds


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path, target, clock):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path / "file"))
    assert clock.times(target, 4)[1] == clock.times(target, 4)[1] > 0


def test_a_slow_pass_is_seen(cache, monkeypatch, target):
    verify = target.verify

    def slow(state, tree):
        time.sleep(0.001 * tree.size)
        return verify(state, tree)

    monkeypatch.setattr(target, "verify", slow)
    found = PassCosts.of_target(target, 33)
    assert all(row[-1] > 0.033 for row in found.seconds)
    assert all(row[-1] > 2 * row[1] for row in found.seconds)


def test_a_slow_moment_is_none_of_a_pass(cache, monkeypatch, target):
    verify, now, passes = target.verify, [0.0], []

    def timed(state, tree):
        # Three rounds of four meet something else that the machine does.
        passes.append(tree.size)
        now[0] += 0.001 * (tree.size + (50 if passes.count(tree.size) % 8 not in (3, 4) else 0))
        return verify(state, tree)

    monkeypatch.setattr(target, "verify", timed)
    monkeypatch.setattr("treeflash.costs.time.perf_counter", lambda: now[0])
    found = PassCosts.of_target(target, 9)
    for row in found.seconds:
        assert row == pytest.approx([0.001 * size for size in found.sizes])


def test_costs_of_a_busy_machine_are_used_for_an_hour(cache, target, clock):
    """For good, trees would seem to cost nothing; timed by each command, they would never be known."""
    # Two rows take as long as six: four took much less, five did not.
    clock.pace[2] = 3.0
    noisy, passes = clock.times(target, 5)
    assert noisy.seconds[0] == pytest.approx([0.01, 0.06, 0.04, 0.05])
    clock.wall += 3500
    assert clock.times(target, 5) == (noisy, 0)
    clock.wall += 200
    clock.pace[2] = 2.5
    found, again = clock.times(target, 5)
    assert again == passes
    assert found.seconds[0] == pytest.approx([0.01, 0.05, 0.04, 0.05])
    # Of a quiet machine they are kept.
    clock.wall += 10**7
    clock.pace[2] = 1.0
    assert clock.times(target, 5) == (found, 0)


def test_times_that_never_agree_are_used_for_an_hour(cache, target, clock, monkeypatch):
    """Though they happen to rise with the rows."""
    verify, rounds = target.verify, []

    def uneven(state, tree):
        rounds.append(tree.size)
        clock.now += 0.01 * rounds.count(tree.size)
        return verify(state, tree)

    monkeypatch.setattr(target, "verify", uneven)
    found, _ = clock.times(target, 5)
    assert found.seconds[0] == sorted(found.seconds[0])
    assert len(rounds) == 4 * 2 * len(found.sizes)
    assert clock.times(target, 5) == (found, 0)
    clock.wall += 3700
    rounds.clear()
    PassCosts.of_target(target, 5)
    assert rounds


def test_a_kept_time_from_the_future_is_not_believed(cache, target, clock):
    clock.pace[2] = 3.0
    PassCosts.of_target(target, 5)
    clock.wall -= 10**6
    assert clock.times(target, 5)[1] > 0


def test_timing_ends_when_its_time_is_up(cache, target, clock):
    """The smallest sizes are timed, after all lengths; their costs go on for an hour."""
    for size in (24, 32, 40):
        clock.pace[size] = 50.0
    found, _ = clock.times(target, 40)
    assert found.sizes == [1, 2, 4, 5, 6, 7, 8, 12, 16, 24]
    assert [len(row) for row in found.seconds] == [10, 10]
    assert clock.now < 60
    assert found.up_to(39, 64)[-1] > found.up_to(23, 64)[-1]
    assert clock.times(target, 40) == (found, 0)
    clock.wall += 4000
    assert clock.times(target, 40)[1] > 0


def test_a_target_too_slow_to_be_timed_gets_small_trees(cache, target, clock, caplog):
    clock.pace.update({size: 1000.0 / size for size in (1, 2, 4, 5, 6, 7, 8)})
    assert PassCosts.of_target(target, 40) is None
    assert not cache.exists()
    context = BuildContext(target, lambda p: p)
    assert CostAware.from_options(CostAwareOptions(most=39, depth=3), context) == OptTree(8, 3)
    assert "trees of 8 nodes are drafted instead" in caplog.text


def test_timing_says_how_far_it_is(cache, target, clock):
    told = []
    PassCosts.of_target(target, 4, progress=lambda done, total: told.append((done, total)))
    # Two rounds of four, since times agree.
    assert told == [(0, 24), *((done, 24) for done in range(12)), (24, 24)]
    told.clear()
    PassCosts.of_target(target, 4, progress=lambda done, total: told.append((done, total)))
    assert told == []


def test_without_a_clock_nothing_is_timed(cache, target, clock):
    context = BuildContext(target, lambda p: p, by_clock=False)
    assert CostAware.from_options(CostAwareOptions(most=9, depth=3), context) == OptTree(9, 3)
    assert clock.passes == []


def test_a_recipe_names_it(cache):
    recipe = Recipe.load("tiny-treeflash", Registry.load(), {"selector": {"use": "cost-aware", "most": 20}})
    decoder = recipe.build(Registry.load())
    assert isinstance(decoder.selector, CostAware)
    text = recipe.load_target(Registry.load()).text
    prompt = text.encode_chat("Ana has 7 apples.")
    found = decoder.generate(prompt, max_new_tokens=60)
    plain = attrs.evolve(decoder, selector=OptTree(0)).generate(prompt, max_new_tokens=60)
    assert found.token_ids == plain.token_ids
    assert all(step.num_drafted <= 20 for step in found.statistics.steps)
    assert all(step.total > 0 for step in found.statistics.steps)


def test_options_reach_the_tree(cache, tiny_target):
    made = CostAware.from_options(
        CostAwareOptions(most=9, depth=3, beam=4), BuildContext(tiny_target, lambda p: p)
    )
    assert made.tree == OptTree(9, 3, 4)
    assert made.costs.sizes == [1, 2, 4, 5, 6, 7, 8, 10]
