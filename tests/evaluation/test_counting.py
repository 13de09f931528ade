"""Figures from counts: known acceptance gives the known tau, and nothing past an end is counted."""

import attrs
import pytest
import torch

from treeflash.engine import Decoder, Emission, Generation
from treeflash.errors import InputError
from treeflash.evaluation.bench import PromptRuns
from treeflash.evaluation.counts import MOST_RANKS, Run, TreeCounts
from treeflash.evaluation.summary import ratios, summarise
from treeflash.recipe import load
from treeflash.statistics import Statistics, StepRecord
from treeflash.tree import TokenTree

PROMPT = [2, *b"Ana has 7 apples. Ana"]


def run(arm="mine", emitted=(), seconds=1.0, **changes):
    made = Run(
        arm=arm,
        turn=0,
        prompt_tokens=3,
        token_ids=[5] * (1 + sum(emitted)),
        stop_reason="max_new_tokens",
        prefill_seconds=0.5,
        decode_seconds=seconds,
        emitted=list(emitted),
        accepted=[count - 1 for count in emitted],
        drafted=[4] * len(emitted),
        depth=[4] * len(emitted),
        seconds={"verify": seconds},
        trees=TreeCounts(),
        peak_bytes=None,
        audit="identical",
    )
    return attrs.evolve(made, **changes)


def prompts(*pairs, name="set"):
    """Prompts with a run of plain decoding and one of another arm."""
    return [
        PromptRuns(name, index, str(index), [run("plain", plain), run("mine", mine)])
        for index, (plain, mine) in enumerate(pairs)
    ]


def timed(*pairs):
    """Prompts of 4 tokens, with the seconds of plain decoding and of another arm."""
    return [
        PromptRuns("set", index, str(index), [run("plain", [1] * 4, plain), run("mine", [4], mine)])
        for index, (plain, mine) in enumerate(pairs)
    ]


def test_tau_is_pooled_over_steps():
    # 8 tokens in 2 steps and 3 in 3: 11 in 5, where a mean of means would be 2.5.
    (_, mine) = summarise(prompts(([1] * 8, [4, 4]), ([1] * 3, [1, 1, 1])))["set"]
    assert mine.block_efficiency == pytest.approx(2.2)
    assert (mine.steps, mine.prompts, mine.new_tokens) == (5, 2, 13)
    # Drawn anew, all prompts may be the first or the second.
    assert (mine.block_efficiency_low, mine.block_efficiency_high) == (1.0, 4.0)


def test_speed_is_a_ratio_of_totals():
    lines = [
        PromptRuns("set", 0, "a", [run("plain", [1] * 4, 2.0), run("mine", [4], 1.0)]),
        PromptRuns("set", 1, "b", [run("plain", [1] * 6, 3.0), run("mine", [3, 3], 4.0)]),
    ]
    plain, mine = summarise(lines)["set"]
    assert plain.tokens_per_second == pytest.approx(10 / 5)
    assert mine.tokens_per_second == pytest.approx(10 / 5)
    assert mine.speedup == pytest.approx(1.0)
    # Drawn anew, all prompts may be the first (4 times as fast) or the second (0.75 times).
    assert (mine.speedup_low, mine.speedup_high) == pytest.approx((0.75, 2.0))
    assert (plain.speedup, plain.speedup_low, plain.speedup_high) == pytest.approx((1.0, 1.0, 1.0))


def test_the_interval_draws_prompts_for_both_arms_together():
    # Twice as fast on each prompt, however fast plain decoding is there.
    _, mine = summarise(timed((1.0, 0.5), (5.0, 2.5), (25.0, 12.5)))["set"]
    assert (mine.speedup_low, mine.speedup_high) == (2.0, 2.0)


def test_the_interval_is_one_of_95_percent():
    # All three draws are the slowest prompt once in 27 times: more than 2.5 %, and less than 5 %.
    _, mine = summarise(timed((4.0, 4.0), (4.0, 2.0), (4.0, 1.0)))["set"]
    assert (mine.speedup_low, mine.speedup_high) == pytest.approx((1.0, 4.0))


def test_the_interval_pools_what_it_draws():
    # One long answer outweighs the others wherever it is drawn.
    _, mine = summarise(timed((1000.0, 250.0), *[(1.0, 1.0)] * 9))["set"]
    assert mine.speedup_high > 3.5


def test_a_draw_of_answers_without_steps_has_no_speed():
    # Half of the prompts end with the prefill's token: a quarter of the draws has nothing else.
    empty = PromptRuns("set", 1, "b", [run("plain", (), 0.0), run("mine", (), 0.0)])
    _, mine = summarise([*timed((1.0, 0.5)), empty])["set"]
    assert (mine.speedup, mine.speedup_low, mine.speedup_high) == (2.0, 2.0, 2.0)


def test_two_arms_are_compared_on_the_same_prompts():
    def line(name, index, mine, other, seconds):
        return PromptRuns(
            name, index, str(index), [run("plain", [1]), run("mine", mine, 1.0), run("other", other, seconds)]
        )

    # Twice the tokens a step on every prompt of the first set, however many those are; in the second once as
    # many and twice as many. As fast in the first, and in the second three times as fast.
    lines = [
        line("a", 0, [4, 4], [2, 2, 2, 2], 1.0),
        line("a", 1, [2], [1, 1], 1.0),
        line("b", 0, [4], [4], 3.0),
        line("b", 1, [4], [2, 2], 3.0),
    ]
    found = ratios(lines, "mine", "other")
    assert list(found) == ["a", "b", "mean"]
    assert [attrs.astuple(ratio) for ratio in found["a"]] == [(2.0, 2.0, 2.0), (1.0, 1.0, 1.0)]
    assert attrs.astuple(found["b"][0]) == pytest.approx((1.5, 1.0, 2.0))
    assert attrs.astuple(found["b"][1]) == pytest.approx((3.0, 3.0, 3.0))
    assert attrs.astuple(found["mean"][0]) == pytest.approx((1.75, 1.5, 2.0))
    assert found["mean"][1].value == pytest.approx(2.0)
    with pytest.raises(InputError, match="no arm is called 'othr'; did you mean 'other'"):
        ratios(lines, "mine", "othr")


def test_accepted_by_depth():
    (_, mine) = summarise(prompts(([1] * 8, [3, 1, 4, 2])))["set"]
    assert mine.accepted == pytest.approx([3 / 4, 2 / 4, 1 / 4, 0.0])


def test_sets_are_kept_apart_and_several_turns_together():
    both = prompts(([1], [2]), name="one") + prompts(([1], [4]), name="two")
    both[1].runs.append(run("mine", [2]))
    found = summarise(both)
    assert [row.block_efficiency for row in found["one"]] == [1.0, 2.0]
    assert [row.block_efficiency for row in found["two"]] == [1.0, 3.0]


def test_an_answer_of_one_token_has_no_steps():
    _, mine = summarise(prompts(([], [])))["set"]
    assert (mine.block_efficiency, mine.tokens_per_second, mine.speedup) == (0.0, 0.0, 0.0)


def test_figures_of_trees_times_and_memory():
    one = TreeCounts([4, 3], [[4, 2], [2, 1]], [[3, 0], [1, 1]])
    two = TreeCounts([2], [[1, 1]], [[0, 1]])
    mine = [
        run(emitted=[2, 2, 1], trees=one, peak_bytes=30, prefill_seconds=0.5, pass_seconds=0.8),
        run(emitted=[1], trees=two, peak_bytes=50, prefill_seconds=0.1, pass_seconds=0.3),
        run(emitted=[1], turn=1, peak_bytes=40, prefill_seconds=0.3, pass_seconds=0.4),
    ]
    stages = ({"draft": 0.3, "verify": 0.9}, {"verify": 0.3}, {})
    mine = [attrs.evolve(one, seconds=spent) for one, spent in zip(mine, stages, strict=True)]
    plain = run("plain", [1], pass_seconds=0.9)
    untimed, endless = run("plain", [1]), run(pass_seconds=None)
    lines = [PromptRuns("set", 0, "a", [plain, mine[0]]), PromptRuns("set", 1, "b", [untimed, *mine[1:]])]
    other, found = summarise(lines)["set"]
    # Five steps in three answers to two prompts.
    assert found.nodes == pytest.approx([6 / 5, 3 / 5])
    assert found.seconds == pytest.approx({"draft": 0.3 / 5, "verify": 1.2 / 5})
    assert found.pass_seconds == pytest.approx(1.5 / 5)
    assert other.pass_seconds is None
    # An answer of the prefill's token alone has no passes to time.
    lines[0].runs.append(endless)
    assert summarise(lines)["set"][1].pass_seconds == pytest.approx(1.5 / 5)
    assert found.rank_rates == [[3 / 5, 1 / 3], [1 / 2, 1.0]]
    assert found.prefill_seconds == pytest.approx(0.9 / 3)
    assert found.peak_bytes == 50


def test_a_run_holds_what_its_records_say():
    steps = [StepRecord(6, 3, 1, 2, {"draft": 0.25, "verify": 1.0}), StepRecord(5, 2, 0, 1, {"draft": 0.5})]
    made = Generation([5] * 4, 9, "max_new_tokens", Statistics(steps, 0.125, 2.0))
    found = Run.of("mine", 1, made, 0.9, TreeCounts([3]), 77, "identical")
    assert (found.prefill_seconds, found.decode_seconds) == (0.125, 2.0)
    assert (found.emitted, found.accepted, found.drafted, found.depth) == ([2, 1], [1, 0], [6, 5], [3, 2])
    assert found.seconds == {"draft": 0.75, "verify": 1.0}
    assert found.pass_seconds == 0.9
    assert (found.arm, found.turn, found.prompt_tokens, found.peak_bytes) == ("mine", 1, 9, 77)


def test_audits_are_counted():
    lines = prompts(([1], [1]), ([1], [1]))
    lines[0].runs[1] = run("mine", [1], audit="near-tie")
    assert summarise(lines)["set"][1].audit == {"identical": 1, "near-tie": 1}


def tree(parents):
    """A tree of the nodes that have these parents, by falling weight."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    count = len(parents)
    return TokenTree(
        token_ids=torch.arange(count)[None],
        parents=torch.tensor([parents]),
        depths=torch.tensor([depths]),
        log_weights=-torch.arange(count, dtype=torch.float32)[None],
        num_nodes=torch.tensor([count]),
        max_depth=max(depths),
    )


def emission(drafted, path, accepted, emitted, reason=None):
    record = StepRecord(int(drafted.num_nodes[0]) - 1, drafted.max_depth, accepted, emitted)
    return Emission([7] * emitted, drafted, path, record, reason, 0.1)


def test_depths_and_ranks_by_hand():
    # Nodes 1 to 3 hang below the root, 4 and 5 below 2, 6 below 4.
    drafted, trees = tree([-1, 0, 0, 0, 2, 2, 4]), TreeCounts()
    trees.see(emission(drafted, [0, 2, 5], 2, 3))
    # The stop token is node 4: node 6 was accepted behind the end, and nobody chose below 4.
    trees.see(emission(drafted, [0, 2, 4, 6], 2, 2, "stop_token"))
    # It is the bonus token: below node 4 something else was chosen.
    trees.see(emission(drafted, [0, 2, 4], 2, 3, "stop_token"))
    trees.see(Emission([7], None, [], None, None, 0.1))
    assert trees.nodes == [9, 6, 3]
    assert [row[:4] for row in trees.offered] == [[3, 3, 3, 0], [3, 3, 0, 0], [1, 0, 0, 0]]
    assert [row[:4] for row in trees.accepted] == [[0, 3, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]]


def test_ranks_past_the_last_are_counted_together():
    trees = TreeCounts()
    trees.see(emission(tree([-1] + [0] * (MOST_RANKS + 4)), [0, MOST_RANKS + 2], 1, 2))
    assert trees.offered == [[1] * (MOST_RANKS - 1) + [5]]
    assert trees.accepted == [[0] * (MOST_RANKS - 1) + [1]]


@pytest.fixture(scope="module")
def decoder():
    return load("tiny-treeflash", target={"device": "cpu"}, selector={"budget": 12})


@pytest.mark.parametrize("limit", [2, 5, 23, 60])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_accepted_token_is_at_its_depth_and_rank(decoder, limit, temperature):
    trees, emissions = TreeCounts(), []

    def see(emission):
        trees.see(emission)
        emissions.append(emission)

    answer = decoder.generate(PROMPT, max_new_tokens=limit, temperature=temperature, seed=3, on_emission=see)
    steps = answer.statistics.steps
    assert sum(trees.nodes) == sum(step.num_drafted for step in steps)
    for depth, (offered, accepted) in enumerate(zip(trees.offered, trees.accepted, strict=True), start=1):
        assert sum(accepted) == sum(step.num_accepted >= depth for step in steps)
        assert all(yes <= there for yes, there in zip(accepted, offered, strict=True))
        # A child of rank r is there only beside one of rank r - 1.
        if all(size < MOST_RANKS for size in (step.num_drafted for step in steps)):
            assert offered == sorted(offered, reverse=True)


def test_a_choice_that_was_never_made_is_not_counted(decoder):
    """The stop token ends the text in mid-path: what hangs below it was not judged."""
    plain = Decoder(decoder.target).generate(PROMPT, max_new_tokens=40)
    stop = plain.token_ids[7]
    trees, last = TreeCounts(), []

    def see(emission):
        trees.see(emission)
        last.append(emission)

    answer = decoder.generate(PROMPT, max_new_tokens=40, stop_ids=[stop], on_emission=see)
    assert answer.token_ids[-1] == stop
    assert sum(map(sum, trees.accepted)) == sum(step.num_accepted for step in answer.statistics.steps)
    judged = sum(offered[0] for offered in trees.offered)
    emitted = sum(step.num_emitted for step in answer.statistics.steps)
    # Each token that a step emitted was one choice, and each choice had at most one likeliest child.
    assert judged <= emitted


def test_counts_add_up_whatever_their_depths():
    one = TreeCounts([3], [[2, 1]], [[1, 0]])
    other = TreeCounts([1, 2], [[1, 1], [2, 0]], [[0, 1], [2, 0]])
    total = TreeCounts([4, 2], [[3, 2], [2, 0]], [[1, 1], [2, 0]])
    assert one + other == total
    assert other + one == total
    assert one == TreeCounts([3], [[2, 1]], [[1, 0]])


def test_runs_are_read_as_they_were_written():
    line = prompts(([1, 1], [2]))[0]
    line.runs[1].trees.nodes.append(4)
    assert PromptRuns.from_json(line.to_json(), "here") == line


def test_pooling_takes_doubles():
    # Thousands of short times must not lose digits.
    lines = prompts(*[([1] * 100, [2] * 50)] * 50)
    plain, _ = summarise(lines)["set"]
    assert plain.tokens_per_second == pytest.approx(100.0, rel=1e-12)
    assert torch.get_default_dtype() == torch.float32


def test_one_prompt_has_no_interval():
    _, alone = summarise(timed((4.0, 2.0)))["set"]
    _, pair = summarise(timed((4.0, 2.0), (4.0, 4.0)))["set"]
    assert (alone.speedup_interval, alone.acceptance_interval) == ("-", "-")
    assert pair.speedup_interval == "1.00 to 2.00"


def test_a_speedup_beyond_the_tokens_a_step_is_disturbed_timing():
    def line(seconds):
        return PromptRuns("set", 0, "a", [run("plain", [1] * 4, 4.0), run("mine", [2, 2], seconds)])

    plain, mine = summarise([line(2.0)])["set"]
    assert (plain.disturbance, mine.disturbance) == (None, None)
    (_, mine) = summarise([line(1.0)])["set"]
    assert "mine: a speedup of 4.00 with 2.00 tokens a step is not possible" in mine.disturbance
    assert "measure again" in mine.disturbance
