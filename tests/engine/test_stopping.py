"""Where a text ends, wherever in a path that falls."""

import numpy as np
import pytest
import torch

from treeflash.components.builders.marginal import Marginal
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.engine.stopping import StopRule
from treeflash.errors import InputError
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text

PROMPT = [2, *b"Ana has 7 coins. Ana"]
BLOCK = 8


@pytest.fixture
def text(tiny_target):
    return list(Decoder(tiny_target).generate(PROMPT, max_new_tokens=40, stop_ids=()).token_ids)


def oracle_decoder(target, text, selector=None):
    drafter = Oracle([*PROMPT, *text], [1.0] * (BLOCK - 1))
    return Decoder(target, drafter, Marginal(), NoRefiner(), selector or Chain())


def first_use(text, at):
    """Index of the first place where the token at `at` is written."""
    return text.index(text[at])


@pytest.mark.parametrize("at", range(20))
def test_stop_token_anywhere_in_a_path(tiny_target, text, at):
    """The oracle's blocks put every index somewhere: first token, mid-path, last accepted, bonus."""
    end = first_use(text, at)
    result = oracle_decoder(tiny_target, text).generate(PROMPT, max_new_tokens=40, stop_ids=[text[at]])
    assert list(result.token_ids) == text[: end + 1]
    assert result.stop_reason == "stop_token"
    assert result.statistics.num_emitted == end


def test_stop_token_as_the_bonus(tiny_target, text):
    """A block of 8 emits tokens 1..8: the token behind the first full path is at index 8."""
    end = 8
    stops = [text[end]]
    if first_use(text, end) != end:
        pytest.fail("the text must not hold the stop token before; choose another prompt")
    result = oracle_decoder(tiny_target, text).generate(PROMPT, max_new_tokens=40, stop_ids=stops)
    (step,) = result.statistics.steps
    assert (step.num_accepted, step.num_emitted) == (7, 8)
    assert result.stop_reason == "stop_token"


def test_several_stop_tokens(tiny_target, text):
    result = oracle_decoder(tiny_target, text).generate(PROMPT, stop_ids=[text[9], text[5], 127])
    assert list(result.token_ids) == text[: min(first_use(text, 9), first_use(text, 5)) + 1]


def test_tokens_past_a_stop_are_not_counted(tiny_target, text):
    end = first_use(text, 4)
    result = oracle_decoder(tiny_target, text).generate(PROMPT, stop_ids=torch.tensor([text[4]]))
    assert result.statistics.block_efficiency == end / len(result.statistics.steps)


@pytest.mark.parametrize("limit", range(1, 20))
def test_limit_inside_a_path(tiny_target, text, limit):
    result = oracle_decoder(tiny_target, text).generate(PROMPT, max_new_tokens=limit, stop_ids=())
    assert list(result.token_ids) == text[:limit]
    assert result.stop_reason == "max_new_tokens"
    # No step drafts deeper than can still be emitted, the bonus token included.
    have = 1
    for step in result.statistics.steps:
        assert step.tree_depth <= limit - have - 1
        have += step.num_emitted


def test_stop_before_limit_at_the_same_token(tiny_target, text):
    limit = first_use(text, 9) + 1
    result = oracle_decoder(tiny_target, text).generate(PROMPT, max_new_tokens=limit, stop_ids=[text[9]])
    assert result.stop_reason == "stop_token"


@pytest.mark.parametrize("budget", [0, 1, 2, 100])
def test_budgets(tiny_target, text, budget):
    result = oracle_decoder(tiny_target, text, OptTree(budget)).generate(
        PROMPT, max_new_tokens=20, stop_ids=()
    )
    assert list(result.token_ids) == text[:20]
    assert all(step.num_drafted <= budget for step in result.statistics.steps)
    if budget == 0:
        assert result.statistics.block_efficiency == 1


def test_text_up_to_the_position_limit(device):
    """The last position may be written, and nothing is read past it, drafts included."""
    model = tiny_model("gpt2", n_positions=24, device=device)  # learned positions: past them, it would crash
    prompt = [1, 2, 3, 4]
    expected = reference_text(model, prompt, 20)
    target = wrap_model(model)
    drafter = Oracle([*prompt, *expected, *expected], [1.0] * 7)
    decoder = Decoder(target, drafter, Marginal(), NoRefiner(), OptTree(31))
    result = decoder.generate(prompt, max_new_tokens=1000)
    assert list(result.token_ids) == expected
    assert result.stop_reason == "position_limit"
    plain = Decoder(target).generate(prompt, max_new_tokens=1000)
    assert (list(plain.token_ids), plain.stop_reason) == (expected, "position_limit")
    with pytest.raises(InputError, match="the prompt has 24 tokens, and the target's 24 positions"):
        decoder.generate([1] * 24)


def test_mask_token_in_the_prompt_and_token_zero_in_the_text(tiny_target, models):
    """Both are tokens like any other."""
    dflash = DFlash.from_checkpoint(models / "tiny-dflash", tiny_target)
    assert dflash.facts.mask_token_id == 1
    prompt = [2, 1, 0, 1, *b"Ana has 7", 0, 1]
    expected = reference_text(tiny_target.model, prompt, 30)
    for selector in (Chain(), OptTree(15)):
        decoder = Decoder(tiny_target, dflash, Marginal(), NoRefiner(), selector)
        assert list(decoder.generate(prompt, max_new_tokens=30, stop_ids=()).token_ids) == expected


def test_token_zero_in_a_tree(device):
    """A vocabulary of two: every tree is full of zeros, and every text has them."""
    model = tiny_model("llama", vocab_size=2, device=device)
    expected = reference_text(model, [1], 30)
    assert 0 in expected
    for hit_rate in (0.5, 1.0):
        drafter = Oracle([1, *expected], [hit_rate] * 5)
        decoder = Decoder(wrap_model(model), drafter, Marginal(), NoRefiner(), OptTree(40))
        result = decoder.generate([1], max_new_tokens=30)
        assert list(result.token_ids) == expected


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([128], {}, r"token ids must be in 0..127, found 128"),
        ([-1], {}, r"token ids must be in 0..127, found -1"),
        ([[1, 2], [3, 4]], {}, r"one sequence at a time is decoded; expected .* found \[2, 2\]"),
        ([1.5], {}, "token ids must be integers"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, found 0"),
        ([1], {"max_new_tokens": 8.0}, "max_new_tokens must be an integer >= 1, found 8.0"),
        ([1], {"stop_ids": 2}, "stop_ids must be a list of token ids, found 2"),
        ([1], {"stop_ids": "2"}, "stop_ids must be a list of token ids, found '2'"),
        ([1], {"stop_ids": [2.0]}, r"stop_ids must be a list of token ids, found \[2.0\]"),
        ([1], {"stop_ids": [True]}, r"stop_ids must be a list of token ids, found \[True\]"),
        ([1], {"stop_ids": torch.tensor([2.0])}, "stop_ids must be a list of token ids, found tensor"),
        ([1], {"temperature": -1.0}, "temperature must be a finite number >= 0, found -1.0"),
        ([1], {"temperature": float("nan")}, "temperature must be a finite number >= 0, found nan"),
        ([1], {"seed": -3}, "seed must be"),
    ],
)
def test_bad_input_is_one_clear_error(tiny_target, prompt, settings, message):
    with pytest.raises(InputError, match=message):
        Decoder(tiny_target).generate(torch.tensor(prompt) if prompt else prompt, **settings)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            {"input_ids": [1], "attention_mask": [1]},
            "expected token ids, found a mapping of input_ids, attention_mask",
        ),
        ([{1}], r"token ids must be one row of integers \(.*set"),
        ("Ana", r"expected token ids, found the text 'Ana'; .*encode_chat"),
    ],
)
def test_what_holds_no_token_ids(tiny_target, prompt, message):
    with pytest.raises(InputError, match=message):
        Decoder(tiny_target).generate(prompt)


INTEGERS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_prompts_of_every_integer_dtype(tiny_target, dtype):
    decoder = Decoder(tiny_target)
    expected = decoder.generate(PROMPT, max_new_tokens=3).token_ids
    for prompt in (np.array(PROMPT, dtype=dtype), torch.tensor(PROMPT).to(getattr(torch, dtype))):
        assert decoder.generate(prompt, max_new_tokens=3).token_ids == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (np.array([1, 2**63 + 5], dtype="uint64"), r"token ids must be in 0..127, found 2\*\*63 or more"),
        (np.array([1, 2**31], dtype="uint32"), "token ids must be in 0..127, found 2147483648"),
        (torch.tensor([1 + 0j]), "token ids must be integers, found torch.complex64"),
        (torch.tensor([True]), "token ids must be integers, found torch.bool"),
        (torch.ones(3, dtype=torch.int64, device="meta"), "found one on the meta device"),
        (torch.ones(3, dtype=torch.int64).to_sparse(), "found one of layout torch.sparse_coo"),
    ],
    ids=["uint64", "uint32", "complex", "bool", "meta", "sparse"],
)
def test_tensors_that_are_no_token_ids(tiny_target, prompt, message):
    with pytest.raises(InputError, match=message):
        Decoder(tiny_target).generate(prompt)


def test_limits_of_both_kinds():
    assert StopRule.make([], 10, 5, 100).limit_reason == "max_new_tokens"
    assert StopRule.make([], 98, 5, 100) == StopRule(frozenset(), 2, "position_limit")
