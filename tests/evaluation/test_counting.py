"""Figures from counts: known acceptance gives the known tau, and nothing past an end is counted."""

import attrs
import pytest
import torch

from treeflash.engine import Decoder
from treeflash.evaluation.bench import PromptRuns
from treeflash.evaluation.counts import MOST_RANKS, Run, TreeCounts
from treeflash.evaluation.summary import summarise
from treeflash.recipe import load

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


def test_tau_is_pooled_over_steps():
    # 8 tokens in 2 steps and 3 in 3: 11 in 5, where a mean of means would be 2.5.
    (_, mine) = summarise(prompts(([1] * 8, [4, 4]), ([1] * 3, [1, 1, 1])))["set"]
    assert mine.block_efficiency == pytest.approx(2.2)
    assert (mine.steps, mine.prompts, mine.new_tokens) == (5, 2, 13)


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


def test_audits_are_counted():
    lines = prompts(([1], [1]), ([1], [1]))
    lines[0].runs[1] = run("mine", [1], audit="near-tie")
    assert summarise(lines)["set"][1].audit == {"identical": 1, "near-tie": 1}


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
    import json

    assert PromptRuns.from_json(json.dumps(attrs.asdict(line))) == line


def test_pooling_takes_doubles():
    # Thousands of short times must not lose digits.
    lines = prompts(*[([1] * 100, [2] * 50)] * 50)
    plain, _ = summarise(lines)["set"]
    assert plain.tokens_per_second == pytest.approx(100.0, rel=1e-12)
    assert torch.get_default_dtype() == torch.float32
