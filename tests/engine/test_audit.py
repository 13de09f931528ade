"""Audits: a planted fault is a mismatch, a near-tie is a near-tie, and equal texts are equal."""

import attrs
import pytest
import torch

from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.engine import Decoder, Generation, stopwatch
from treeflash.engine.audit import LOSSY, MISMATCH, NEAR_TIE, Audit, Recorded, audited, compare, recorded
from treeflash.recipe import load
from treeflash.sampling import Draws
from treeflash.statistics import Statistics
from treeflash.testing.careless import Careless
from treeflash.testing.lenient import Lenient

PROMPT = [2, *b"Ana has 7 apples. Ana"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_right_decoder_is_identical(temperature):
    decoder = load("tiny-treeflash", target={"device": "cpu"})
    target = decoder.target
    generation, audit = audited(decoder, PROMPT, max_new_tokens=60, temperature=temperature, seed=4)
    assert audit == Audit(True, None, None)
    again = decoder.generate(PROMPT, max_new_tokens=60, temperature=temperature, seed=4)
    assert list(again.token_ids) == list(generation.token_ids)
    assert decoder.drafter._target is target


def test_passes_are_timed_apart_from_the_rest(monkeypatch):
    decoder = load("tiny-treeflash", target={"device": "cpu"})
    now = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: now[0])
    verify = decoder.target.verify

    def advanced(seconds, function):
        def slow(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return slow

    monkeypatch.setattr(decoder.target, "verify", advanced(2.0, verify))
    monkeypatch.setattr(type(decoder.selector), "select", advanced(5.0, type(decoder.selector).select))
    found = recorded(decoder, PROMPT, max_new_tokens=20)
    steps = len(found.generation.statistics.steps)
    assert steps > 1
    assert found.pass_seconds == pytest.approx(2.0 * steps)
    assert found.generation.statistics.seconds_per_stage["select"] >= 5.0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_planted_fault_is_a_mismatch(temperature):
    decoder = attrs.evolve(load("tiny-treeflash", target={"device": "cpu"}), verifier=Careless())
    _, audit = audited(decoder, PROMPT, max_new_tokens=150, temperature=temperature, stop_ids=())
    # The first new token is the prefill's.
    assert audit == Audit(False, 100, MISMATCH)


def test_what_is_lossy_on_purpose_is_not_compared(monkeypatch):
    decoder = attrs.evolve(load("tiny-treeflash", target={"device": "cpu"}), verifier=Lenient())
    assert not decoder.lossless
    assert attrs.evolve(decoder, verifier=SdpaTree()).lossless
    # Otherwise it would be a mismatch.
    monkeypatch.setattr(Lenient, "lossless", True)
    assert audited(decoder, PROMPT, max_new_tokens=40, stop_ids=())[1].kind == MISMATCH
    monkeypatch.undo()
    generation, audit = audited(decoder, PROMPT, max_new_tokens=40, stop_ids=())
    assert audit == Audit(None, None, LOSSY)
    assert generation.token_ids == decoder.generate(PROMPT, max_new_tokens=40, stop_ids=()).token_ids


def logits(dtype=torch.bfloat16, **values):
    made = torch.full((10,), -5.0, dtype=dtype)
    for name, value in values.items():
        made[int(name[1:])] = value
    return made


def run(token_ids, scores):
    return Recorded(Generation(token_ids, 3, "max_new_tokens", Statistics([], 0.0, 0.0)), scores)


GREEDY = Draws()


@pytest.mark.parametrize(
    ("mine", "theirs", "kind"),
    [
        (logits(t1=1.00, t2=1.02), logits(t1=1.01, t2=1.00), NEAR_TIE),
        # One of the two best was taken, but not the best, and rounding does not account for it.
        (logits(t1=2.00, t2=1.00), logits(t1=2.01, t2=1.00), MISMATCH),
        # Three that nearly tie.
        (logits(t1=1.00, t2=1.02, t3=1.01), logits(t1=1.03, t2=1.02, t3=1.02), NEAR_TIE),
        # Neither run would choose the other's token.
        (logits(t1=1.00, t2=3.00), logits(t1=1.05, t2=3.00), MISMATCH),
        # Each run took its best, but rounding does not take scores so far apart: in this dtype, or in any.
        (logits(torch.float32, t1=1.00, t2=1.02), logits(torch.float32, t1=1.02, t2=1.00), MISMATCH),
        (logits(t1=1.00, t2=3.00), logits(t1=3.00, t2=1.00), MISMATCH),
        (logits(t1=1.00, t2=float("nan")), logits(t1=1.01, t2=1.00), MISMATCH),
    ],
)
def test_kinds(mine, theirs, kind):
    same = logits(t5=1.0)
    found = compare(run([5, 2], [same, mine]), run([5, 1], [same, theirs]), GREEDY)
    assert found == Audit(False, 1, kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_logits_are_a_mismatch(dtype):
    """A target that reads trees otherwise than texts: whatever it chose by, it chose the best of."""
    decoder = load("tiny-treeflash", target={"device": "cpu", "dtype": dtype})
    target, verify = decoder.target, decoder.target.verify

    def misread(state, tree, first=0):
        output = verify(state, tree, first)
        return output if tree.size == 1 else attrs.evolve(output, logits=output.logits.roll(1, dims=-1))

    target.verify = misread
    _, audit = audited(decoder, PROMPT, max_new_tokens=60, stop_ids=())
    # The first new token is the prefill's.
    assert audit == Audit(False, 1, MISMATCH)


def test_a_text_that_ends_early_is_a_mismatch():
    same = logits(t5=1.0)
    assert compare(run([5], [same]), run([5, 5], [same, same]), GREEDY) == Audit(False, 1, MISMATCH)


def test_scores_are_what_choices_are_made_by():
    draws = Draws(0.7, 11, (3,))
    random = torch.Generator().manual_seed(0)
    for position in range(20):
        row = torch.randn(50, generator=random)
        where = torch.tensor([position])
        chosen = draws.choose(row[None, None], where, torch.zeros(1, 1, dtype=torch.int64), 0)
        assert int(chosen) == int(draws.scores(row, position).argmax()) == draws.choose_one(row, position)


def test_plain_decoding_is_identical_to_itself(tiny_target):
    _, audit = audited(Decoder(tiny_target), PROMPT, max_new_tokens=20)
    assert audit.identical
