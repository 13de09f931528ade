"""Composition in Python: what fits, what does not, and what a step reports."""

import time

import attrs
import pytest
import torch

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import CheckpointError, CompositionError, InputError, TreeflashError
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.types import Limits

PROMPT = [2, *b"Dee has 18 coins. Dee finds"]


@pytest.fixture
def parts(tiny_target, models):
    folder = models / "tiny-treeflash"
    return DFlash.from_checkpoint(folder, tiny_target), SwiGlu.from_checkpoint(folder, tiny_target)


def test_transformers_own_greedy_decoding_agrees(tiny_target, parts):
    """An independent judge, stop tokens and all."""
    dflash, swiglu = parts
    ids = torch.tensor([PROMPT], device=tiny_target.device)
    judged = tiny_target.model.generate(ids, max_new_tokens=60, do_sample=False)[0, len(PROMPT) :].tolist()
    result = Decoder(tiny_target, dflash, TopM(), swiglu, OptTree(15)).generate(PROMPT, max_new_tokens=60)
    assert list(result.token_ids) == judged


@pytest.mark.parametrize("builder", [TopM(100_000, 100_000), Frontier(100_000), TopM(1, 1)])
def test_more_contexts_and_children_than_the_vocabulary(tiny_target, parts, builder):
    dflash, swiglu = parts
    plain = Decoder(tiny_target).generate(PROMPT, max_new_tokens=20)
    result = Decoder(tiny_target, dflash, builder, swiglu, OptTree(200)).generate(PROMPT, max_new_tokens=20)
    assert result.token_ids == plain.token_ids


def test_prompt_forms_are_equal(tiny_target):
    decoder = Decoder(tiny_target)
    forms = [PROMPT, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT], dtype=torch.int32)]
    results = [decoder.generate(form, max_new_tokens=5) for form in forms]
    assert {tuple(result.token_ids) for result in results} == {tuple(results[0].token_ids)}
    assert {result.prompt_tokens for result in results} == {len(PROMPT)}


def test_sequences_under_one_seed_differ(tiny_target):
    decoder = Decoder(tiny_target)
    texts = [
        tuple(
            decoder.generate(PROMPT, max_new_tokens=20, temperature=2.0, seed=1, sequence=sequence).token_ids
        )
        for sequence in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_two_texts_at_once_do_not_mix(tiny_target, parts):
    """Components hold weights only: streams of one decoder may be interleaved."""
    dflash, swiglu = parts
    decoder = Decoder(tiny_target, dflash, TopM(), swiglu, OptTree(15))
    prompts = [PROMPT, [2, *b"Fay has 11 books."]]
    alone = [list(decoder.generate(prompt, max_new_tokens=30).token_ids) for prompt in prompts]
    streams = [decoder.stream(prompt, max_new_tokens=30) for prompt in prompts]
    together = [[], []]
    for _ in range(30):
        for stream, tokens in zip(streams, together, strict=True):
            tokens += next(stream).token_ids if len(tokens) < 30 else []
    assert together == alone


def test_emissions_tell_the_whole_story(tiny_target, parts):
    dflash, swiglu = parts
    decoder = Decoder(tiny_target, dflash, TopM(), swiglu, OptTree(15))
    emissions = list(decoder.stream(PROMPT, max_new_tokens=30, stop_ids=()))
    first, *steps = emissions
    assert (len(first.token_ids), first.tree, first.record) == (1, None, None)
    anchor = first.token_ids[0]
    for emission in steps:
        emission.tree.validate()
        assert int(emission.tree.token_ids[0, 0]) == anchor
        spelled = emission.tree.token_ids[0, emission.path[1:]].tolist()
        assert spelled == emission.token_ids[: len(spelled)] or emission.stop_reason
        assert len(emission.token_ids) == emission.record.num_emitted
        anchor = emission.token_ids[-1]
    assert [emission.stop_reason for emission in emissions[:-1]] == [None] * (len(emissions) - 1)


def test_stages_are_timed(tiny_target, parts):
    dflash, swiglu = parts
    decoder = Decoder(tiny_target, dflash, TopM(), swiglu, OptTree(15))
    result = decoder.generate(PROMPT, max_new_tokens=20, time_stages=True)
    stages = result.statistics.seconds_per_stage
    assert set(stages) == {"draft", "build", "refine", "select", "verify", "commit"}
    assert sum(stages.values()) <= result.statistics.decode_seconds
    assert result.tokens_per_second > 0


def test_gpu_stages_are_timed_only_when_asked(tiny_target, parts):
    dflash, swiglu = parts
    decoder = Decoder(tiny_target, dflash, TopM(), swiglu, OptTree(15))
    stages = decoder.generate(PROMPT, max_new_tokens=20).statistics.seconds_per_stage
    assert bool(stages) == (tiny_target.device.type == "cpu")


def test_time_of_whoever_receives_is_not_counted(tiny_target, monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def receive(emission):
        nonlocal now
        now += 100

    result = Decoder(tiny_target).generate(PROMPT, max_new_tokens=4, stop_ids=(), on_emission=receive)
    assert result.statistics.prefill_seconds == result.statistics.decode_seconds == 0
    assert not any(result.statistics.seconds_per_stage.values())


def test_tree_depth_is_that_of_the_deepest_node(tiny_target, parts):
    dflash, swiglu = parts
    decoder = Decoder(tiny_target, dflash, TopM(), swiglu, OptTree(15))
    for emission in decoder.stream(PROMPT, max_new_tokens=30):
        if emission.tree is not None:
            assert emission.record.tree_depth == int(emission.tree.depths.max())
            assert emission.record.num_drafted == int(emission.tree.num_nodes[0]) - 1
            promised = float(emission.tree.log_weights.exp()[emission.tree.is_node].sum()) - 1
            assert emission.record.expected == pytest.approx(promised, abs=1e-4)


class Padded(OptTree):
    """Leaves slots behind its nodes, as on a GPU."""

    def select(self, proposal, limits):
        tree = super().select(proposal, limits)

        def widened(part, value):
            return torch.cat([part, part.new_full((1, 3), value)], dim=1)

        return attrs.evolve(
            tree,
            token_ids=widened(tree.token_ids, 1),
            parents=widened(tree.parents, 0),
            depths=widened(tree.depths, 1),
            log_weights=widened(tree.log_weights, 0.0),
        )


def test_empty_slots_count_for_nothing(tiny_target, parts):
    dflash, swiglu = parts
    told = [
        Decoder(tiny_target, dflash, TopM(), swiglu, selector).generate(PROMPT, max_new_tokens=30)
        for selector in (OptTree(9), Padded(9))
    ]
    assert told[0].token_ids == told[1].token_ids
    assert told[1].statistics.steps[0].num_drafted == 9
    promised = [[step.expected for step in each.statistics.steps] for each in told]
    assert promised[1] == pytest.approx(promised[0])


def test_settings_are_checked_before_the_first_token(tiny_target):
    with pytest.raises(InputError, match="the prompt is empty"):
        Decoder(tiny_target).stream([])


def test_weights_of_another_dtype(tiny_target, parts):
    dflash, swiglu = parts
    swiglu.network.double()
    with pytest.raises(CheckpointError, match=r"the target's torch.float32, found torch.float64"):
        Decoder(tiny_target, dflash, TopM(), swiglu)
    dflash.network.double()
    with pytest.raises(CheckpointError, match=r"the target's torch.float32, found torch.float64"):
        Decoder(tiny_target, dflash, Marginal(), NoRefiner())


def test_a_tree_rooted_elsewhere_is_noticed(tiny_target, parts):
    dflash, _ = parts

    class Astray(OptTree):
        def select(self, proposal, limits):
            tree = super().select(proposal, limits)
            return attrs.evolve(tree, token_ids=tree.token_ids + 1)

    decoder = Decoder(tiny_target, dflash, Marginal(), NoRefiner(), Astray(5))
    with pytest.raises(CompositionError, match=r"token .* for its root, expected the anchor"):
        decoder.generate(PROMPT)


def test_a_drafter_without_a_depth_is_refused(tiny_target):
    class Depthless(Oracle):
        max_depth = None

    with pytest.raises(CompositionError, match="Depthless does not say its max_depth"):
        Decoder(tiny_target, Depthless([], [1.0]), Marginal(), NoRefiner())


def test_parts_that_do_not_fit(tiny_target, parts):
    dflash, swiglu = parts
    with pytest.raises(
        CompositionError,
        match=r"builder: expected one, because drafter DFlash drafts blocks.* refiner: expected one",
    ):
        Decoder(tiny_target, dflash)
    with pytest.raises(
        CompositionError, match=r"refiner: expected none, because drafter NoDrafter .* found SwiGlu"
    ):
        Decoder(tiny_target, refiner=swiglu)
    with pytest.raises(
        CompositionError, match="expected contexts of 1 token, which refiner SwiGlu looks at; found Marginal"
    ):
        Decoder(tiny_target, dflash, Marginal(), swiglu)
    assert issubclass(CompositionError, TypeError)
    assert issubclass(CompositionError, TreeflashError)


def test_drafter_of_another_target(tiny_target, parts, device):
    dflash, _ = parts
    with pytest.raises(
        CheckpointError, match=r"(?s)hidden_size: expected the target's 32, found 64.*vocab_size"
    ):
        Decoder(wrap_model(tiny_model("llama", device=device)), dflash, Marginal(), NoRefiner(), Chain())


def test_oracle_is_right_as_often_as_it_is_told(tiny_target):
    """Acceptance at each depth, given that the depth was reached, is the rate prescribed."""
    plain = Decoder(tiny_target).generate(PROMPT, max_new_tokens=400, stop_ids=())
    rates = [0.9, 0.5, 0.7]
    drafter = Oracle([*PROMPT, *plain.token_ids], rates)
    decoder = Decoder(tiny_target, drafter, Marginal(), NoRefiner(), Chain())
    result = decoder.generate(PROMPT, max_new_tokens=400, stop_ids=())
    assert result.token_ids == plain.token_ids
    accepted = [len(result.statistics.steps), *result.statistics.accepted_per_depth]
    for depth, rate in enumerate(rates):
        found, spread = accepted[depth + 1] / accepted[depth], (rate * (1 - rate) / accepted[depth]) ** 0.5
        assert found == pytest.approx(rate, abs=4 * spread + 0.02)


def test_a_drafter_is_told_the_last_two_tokens(tiny_target):
    """Whatever was accepted: the token before the anchor, and the anchor."""
    plain = Decoder(tiny_target).generate(PROMPT, max_new_tokens=60, stop_ids=())
    text, told = [*PROMPT, *plain.token_ids], []

    class Listener(Oracle):
        def propose(self, state, recent, limits):
            told.append((int(state.lengths[0]), recent[0].tolist()))
            return super().propose(state, recent, limits)

    drafter = Listener(text, [0.8, 0.5, 0.5, 0.5])
    Decoder(tiny_target, drafter, Marginal(), NoRefiner(), Chain()).generate(PROMPT, max_new_tokens=60)
    assert len(told) > 10
    for anchor, recent in told:
        assert recent == text[anchor - 1 : anchor + 1]


def counts(ids):
    return torch.tensor([ids.shape[1]])


def test_rewound_state_drafts_as_if_it_had_never_gone_on(tiny_target, parts):
    """Rejected or forgotten positions leave no trace in the target's or the drafter's cache."""
    dflash, _ = parts
    Decoder(tiny_target, dflash, Marginal(), NoRefiner())
    ids = torch.tensor([PROMPT], device=tiny_target.device)
    more = torch.tensor([[*PROMPT, 65, 66, 67, 68]], device=tiny_target.device)
    with torch.inference_mode():
        drafts = []
        for prompt in (ids, more):
            state, memory = tiny_target.start(1, 64, dflash.tap_layers), dflash.start(1, 64)
            dflash.extend(memory, prompt, tiny_target.prefill(state, prompt).taps, counts(prompt))
            tiny_target.rewind(state, counts(ids))
            dflash.rewind(memory, counts(ids))
            again = torch.tensor([[70, 71]], device=tiny_target.device)
            dflash.extend(memory, again, tiny_target.prefill(state, again).taps, counts(again))

            drafts.append(dflash.propose(memory, again, Limits(7, 7)).hidden)
    torch.testing.assert_close(drafts[0], drafts[1])


class RootAlone(OptTree):
    """Finds nothing worth its while in any draft."""

    def select(self, proposal, limits):
        return super().select(proposal, limits).first(1)


@pytest.mark.parametrize(
    "selector", [RootAlone(15), OptTree(15), OptTree(0)], ids=["in vain", "tree", "none"]
)
def test_a_draft_that_comes_to_nothing_was_tried(tiny_target, parts, selector):
    dflash, swiglu = parts
    decoder = Decoder(tiny_target, dflash, TopM(), swiglu, selector)
    steps = decoder.generate([2, *b"Ana has 7 apples."], max_new_tokens=12).statistics.steps
    # For the last token of all no draft is needed.
    assert {step.tried for step in steps[:-1]} == {selector.budget > 0}
    if isinstance(selector, RootAlone):
        assert not any(step.num_drafted for step in steps)
