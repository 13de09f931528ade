"""As many nodes as are worth what they cost, and what a pass costs."""

import json
import time

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash import costs as costs_module
from treeflash.components.selectors.cost_aware import CostAware, CostAwareOptions
from treeflash.components.selectors.opt_tree import OptTree
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
    overhead=st.sampled_from([0.0, 0.5, 20.0]),
    expected=st.sampled_from([None, 0.5, 40.0]),
)
def test_the_most_expected_tokens_a_second(table, seed, overhead, expected):
    generator = torch.Generator().manual_seed(seed)
    seconds = torch.rand(30, generator=generator).cumsum(0).tolist()
    selector = CostAware(PassCosts(range(1, 31), [64], [seconds]), OptTree(29))
    # The pace is that of the measurement.
    step = StepRecord(
        29, 3, 1, 2, {"verify": seconds[29]}, seconds[29] + overhead, tried=True, expected=expected
    )
    trust = 1.0 if expected is None else 6 / (5 + expected)
    limits = selector.plan([step], Limits(29, 3, 64))
    draft = proposal(table)
    whole, found = OptTree(29).select(draft, limits), selector.select(draft, limits)
    weights = whole.log_weights[0].exp().double()
    rates = [
        (1 + trust * float(weights[1:n].sum())) / (seconds[n - 1] + overhead)
        for n in range(1, whole.size + 1)
    ]
    assert rates[found.size - 1] == pytest.approx(max(rates), rel=1e-5)
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
        assert (first.nodes, first.depth, first.length, first.overhead) == (127, 5, 64, 0.0)

    def test_what_lies_around_the_pass_is_overhead(self):
        found = self.plan([step(9, 3, total=1.25, verify=1.0), step(30, 3, total=2.25, verify=1.0)])
        assert found.overhead == pytest.approx(0.75)
        assert (found.nodes, found.depth) == (8 + 2 * 30, 5)

    def test_weights_count_as_far_as_they_have_come_true(self):
        told = attrs.evolve(step(9, 3), expected=3.0)
        assert self.plan([told]).trust == pytest.approx((5 + 2) / (5 + 3.0))
        both = self.plan([told, attrs.evolve(told, expected=4.0)])
        assert both.trust == pytest.approx((5 + 2 + 0.97 * 2) / (5 + 4.0 + 0.97 * 3.0))
        silent = step(9, 3)
        assert self.plan([told, silent, silent]).trust == pytest.approx(
            (5 + 0.97**2 * 2) / (5 + 0.97**2 * 3.0)
        )
        assert self.plan([silent]).trust == 1.0

    def test_trust_comes_back_where_nothing_is_drafted(self):
        lost = [attrs.evolve(step(9, 1, total=0.76), expected=6.0)] * 20
        empty = attrs.evolve(step(0, 1, total=0.76), expected=0.0, tried=True)
        assert self.plan(lost).trust < 0.1
        assert self.plan([*lost, *[empty] * 100]).trust > 0.5

    def test_drafts_that_do_not_pay_are_paused_and_tried_again(self):
        # A pass without a draft takes 0.75 s now; these emit 1.25 tokens in 1.5 s.
        steps = [step(9, 2, total=1.5)] * 4 + [step(9, 1, total=1.5)] * 12
        pauses = 0
        assert self.plan(steps[:-1]).nodes > 0
        while self.plan(steps).nodes == 0:
            steps = [*steps, step(0, 1, verify=1.0)]
            pauses += 1
        assert pauses == 8
        # One that fails keeps the pause up.
        steps.append(step(9, 1, total=1.5))
        assert self.plan(steps).nodes == 0
        # Some that pay end it.
        steps += [step(9, 8, total=1.5)] * 7
        assert self.plan(steps).nodes > 0

    @pytest.mark.parametrize("drafted", [9, 0])
    def test_drafts_that_never_pay_are_tried_every_ninth_step(self, drafted):
        """Those that come to nothing too."""
        steps = []
        for _ in range(600):
            tried = self.plan(steps).nodes > 0
            record = step(drafted if tried else 0, 1, total=1.5 if tried else 1.0, verify=1.0)
            steps.append(attrs.evolve(record, tried=tried))
        assert all(step.tried for step in steps[:16])
        late = [step.tried for step in steps[100:]]
        assert sum(late) / len(late) == pytest.approx(1 / 9, abs=0.01)

    def test_drafts_that_pay_or_nearly_pay_are_not_paused(self):
        assert self.plan([step(9, 2, total=1.5)] * 20).nodes > 0
        # 20 tokens in 16 s, where plain decoding would have taken 15.
        assert self.plan(([step(9, 1, total=1.0)] * 3 + [step(9, 2, total=1.0)]) * 4).nodes > 0

    def test_times_go_by_the_present_pace(self):
        """Everything twice as slow as when it was measured: the same decisions."""
        usual, slow = ([step(9, 3, 1.5 * pace, 1.0 * pace)] * 4 for pace in (1, 2))
        assert self.plan(slow).overhead == pytest.approx(self.plan(usual).overhead) == pytest.approx(0.5)
        lost, lost_slowly = (
            [step(9, 1, 1.5 * pace, 1.0 * pace), step(9, 2, 1.5 * pace, 1.0 * pace)] * 8 for pace in (1, 2)
        )
        assert self.plan(lost).nodes == self.plan(lost_slowly).nodes > 0

    def test_without_times_of_stages_passes_take_what_was_measured(self):
        """As on a GPU."""
        found = self.plan([StepRecord(9, 3, 1, 2, {}, 1.5, tried=True)] * 3)
        assert found.overhead == pytest.approx(0.5)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    return tmp_path / "costs"


@pytest.fixture
def measured(monkeypatch):
    """Behind how many positions passes were timed, at a pace that never falls, however busy the machine."""
    calls, measure = [], costs_module._measure

    def spy(*given):
        calls.append(given[1])
        return sorted(measure(*given))

    monkeypatch.setattr(costs_module, "_measure", spy)
    return calls


def test_a_target_is_measured_once(cache, measured, monkeypatch):
    target = wrap_model(tiny_model("llama"))
    found = PassCosts.of_target(target, 20)
    assert measured == [64, 236]  # a shorter text where the target ends
    assert (found.sizes, found.lengths) == ([1, 2, 4, 5, 6, 7, 8, 12, 16, 20], [64, 236])
    assert all(value > 0 for row in found.seconds for value in row)
    assert PassCosts.of_target(target, 20) == found
    assert len(measured) == 2
    assert PassCosts.of_target(target, 20, refresh=True).sizes == found.sizes
    assert len(measured) == 4
    # Another model, other sizes or another number of threads.
    PassCosts.of_target(wrap_model(tiny_model("llama", seed=1)), 20)
    PassCosts.of_target(target, 21)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    PassCosts.of_target(target, 20)
    assert len(measured) == 10
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize(
    "held", ["", "[", "{}", '{"seconds": [[1]]}', '{"seconds": 3}', '{"seconds": [["x"]]}']
)
def test_a_damaged_file_is_measured_again(cache, measured, held):
    target = wrap_model(tiny_model("llama"))
    PassCosts.of_target(target, 4)
    (path,) = cache.iterdir()
    path.write_text(held)
    found = PassCosts.of_target(target, 4)
    assert len(measured) == 4
    assert json.loads(path.read_text())["seconds"] == found.seconds


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path, measured):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path / "file"))
    target = wrap_model(tiny_model("llama"))
    for _ in range(2):
        assert len(PassCosts.of_target(target, 4).seconds) == 2
    assert len(measured) == 4


def test_a_slow_pass_is_seen(cache, monkeypatch):
    target = wrap_model(tiny_model("llama"))
    verify = target.verify

    def slow(state, tree):
        time.sleep(0.001 * tree.size)
        return verify(state, tree)

    monkeypatch.setattr(target, "verify", slow)
    found = PassCosts.of_target(target, 33)
    assert all(row[-1] > 0.033 for row in found.seconds)
    assert all(row[-1] > 2 * row[1] for row in found.seconds)


def test_a_slow_moment_is_none_of_a_pass(cache, monkeypatch):
    target = wrap_model(tiny_model("llama"))
    verify, now, passes = target.verify, [0.0], []

    def timed(state, tree):
        # Three rounds of four meet something else that the machine does.
        passes.append(tree.size)
        now[0] += tree.size + (50 if passes.count(tree.size) % 4 != 2 else 0)
        return verify(state, tree)

    monkeypatch.setattr(target, "verify", timed)
    monkeypatch.setattr("treeflash.costs.time.perf_counter", lambda: now[0])
    found = PassCosts.of_target(target, 9)
    assert [list(row) for row in found.seconds] == [found.sizes] * 2


def test_costs_that_fall_are_measured_again(cache, monkeypatch):
    """So does a machine that was busy at first: trees would seem to cost nothing, for ever."""
    target = wrap_model(tiny_model("llama"))
    verify, now, pace = target.verify, [0.0], {2: 3.0}

    def timed(state, tree):
        now[0] += tree.size * pace.get(tree.size, 1.0)
        return verify(state, tree)

    monkeypatch.setattr(target, "verify", timed)
    monkeypatch.setattr("treeflash.costs.time.perf_counter", lambda: now[0])
    # Two rows take as long as six: four took much less, five did not.
    assert PassCosts.of_target(target, 5).seconds[0] == [1.0, 6.0, 4.0, 5.0]
    assert not cache.exists()
    pace[2] = 2.5
    found = PassCosts.of_target(target, 5)
    assert found.seconds[0] == [1.0, 5.0, 4.0, 5.0]
    pace[2] = 1.0
    assert PassCosts.of_target(target, 5).seconds == found.seconds


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
