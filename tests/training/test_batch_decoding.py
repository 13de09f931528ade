"""Many prompts at once are answered as each alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeflash.errors import InputError
from treeflash.target import wrap_model
from treeflash.testing.families import FAMILIES, tiny_model
from treeflash.testing.reference import reference_text
from treeflash.training.batch_decoding import decode_batch

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12], [13, 14], [15] * 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family, temperature, device):
    # Gemma 2's attention computes in float32, where the library's padding mask of float64 overflows: padding
    # has NaN for states there.
    target = wrap_model(tiny_model(family, dtype=torch.float64, device=device))
    answers = decode_batch(target, PROMPTS, max_new_tokens=12, temperature=temperature, seed=3)
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        expected = reference_text(target.model, prompt, 12, temperature=temperature, seed=3, sequence=number)
        assert answer.token_ids == expected
        assert answer.stop_reason == "max_new_tokens"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_tokens_that_no_prompt_has_do_not_matter(family, value, device):
    """Whatever stands in the padding, its states must not reach a text."""
    model = tiny_model(family, vocab_size=400, device=device)
    target = wrap_model(model)
    expected = [reference_text(model, prompt, 8) for prompt in PROMPTS]
    written = {token for text in [*PROMPTS, *expected] for token in text}
    unused = torch.tensor([token for token in range(400) if token not in written], device=device)
    assert 0 in unused
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[unused] = value * torch.finfo(weight.dtype).max if value == 1 else value
    counted = []
    answers = decode_batch(target, PROMPTS, max_new_tokens=8, on_tokens=counted.append)
    assert [answer.token_ids for answer in answers] == expected
    assert sum(counted) == 8 * len(PROMPTS)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stop=st.integers(0, 39), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_rows_end_at_their_own_time(stop, lengths, device):
    target = wrap_model(tiny_model("llama", dtype=torch.float64, device=device))
    target.stop_ids = (stop,)
    prompts = [[(7 * row + place) % 40 for place in range(length)] for row, length in enumerate(lengths)]
    written = []
    answers = decode_batch(target, prompts, max_new_tokens=16, on_tokens=written.append)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference_text(target.model, prompt, 16, stop_ids=[stop])
        assert answer.stop_reason == ("stop_token" if answer.token_ids[-1] == stop else "max_new_tokens")
    assert sum(written) == sum(len(answer.token_ids) for answer in answers)


def test_rows_up_to_the_position_limit(device):
    target = wrap_model(tiny_model("gpt2", n_positions=16, dtype=torch.float64, device=device))
    prompts = [[1] * 15, [2] * 10, [3] * 4]
    answers = decode_batch(target, prompts, max_new_tokens=100)
    assert [len(answer.token_ids) for answer in answers] == [1, 6, 12]
    assert {answer.stop_reason for answer in answers} == {"position_limit"}
    with pytest.raises(InputError, match="prompt 0 has 16 tokens, expected fewer than the target's 16"):
        decode_batch(target, [[1] * 16], max_new_tokens=1)
    with pytest.raises(InputError, match="prompt 1 is empty"):
        decode_batch(target, [[1], []], max_new_tokens=1)
