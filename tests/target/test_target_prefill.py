"""Prompts: in pieces or whole, at once or in turns."""

import inspect

import pytest
import torch

import treeflash.target.hugging_face as hugging_face
from treeflash.errors import InputError
from treeflash.target import wrap_model
from treeflash.testing.families import FAMILIES, tiny_model

from .target_helpers import assert_close, plain, row, shared_target

PROMPT = [11, 3, 29, 17, 5, 38, 22, 9, 14, 2, 31]


def read(target, state, ids):
    with torch.no_grad():
        return target.prefill(state, row(ids, target.device))


@pytest.mark.parametrize("count", [11, 8, 4, 3, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_equal_one_piece(monkeypatch, family, count, device):
    target = shared_target(family, torch.float64, device)
    whole_state, state = (target.start(1, 16, (1, 0)) for _ in range(2))
    whole = read(target, whole_state, PROMPT[:count])
    monkeypatch.setattr(hugging_face, "_PREFILL_CHUNK", 4)
    pieces = read(target, state, PROMPT[:count])
    assert pieces.logits.shape == whole.logits.shape == (1, 1, 40)
    assert pieces.taps.shape == whole.taps.shape == (1, count, 64)
    assert_close(pieces.logits, whole.logits, family)
    assert_close(pieces.taps, whole.taps, family)
    assert state.cache.length == count


def test_no_pass_is_longer_than_a_piece(monkeypatch, device):
    target = shared_target("llama", torch.float32, device)
    lengths = []
    forward = target.model.forward

    def spy(**inputs):
        lengths.append(inputs["input_ids"].shape[1])
        return forward(**inputs)

    monkeypatch.setattr(target.model, "forward", spy)
    monkeypatch.setattr(hugging_face, "_PREFILL_CHUNK", 4)
    read(target, target.start(1, 16, ()), PROMPT)
    assert lengths == [4, 4, 3]


def test_only_the_last_position_is_projected(monkeypatch, device):
    # A row of logits is as wide as the vocabulary: a long prompt's would fill the memory.
    target = shared_target("qwen3", torch.float32, device)
    rows = []
    head = target.model.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    read(target, target.start(1, 16, ()), PROMPT)
    handle.remove()
    assert rows == [1]


def test_a_forward_that_projects_everything_gives_the_last_position_too(monkeypatch, device):
    model = tiny_model("llama", dtype=torch.float64, device=device)
    forward = model.forward
    signature = inspect.signature(forward)
    kept = [value for name, value in signature.parameters.items() if name != "logits_to_keep"]

    def older(**inputs):
        assert "logits_to_keep" not in inputs
        return forward(**inputs)

    older.__signature__ = signature.replace(parameters=kept)
    expected = plain(model, PROMPT)[-1]
    monkeypatch.setattr(model, "forward", older)
    target = wrap_model(model)
    logits = read(target, target.start(1, 16, ()), PROMPT).logits
    assert logits.shape == (1, 1, 40)
    assert_close(logits[0, 0], expected)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2"])
def test_a_second_prompt_goes_on_behind_the_first(family, device):
    target = shared_target(family, torch.float64, device)
    state = target.start(1, 16, (0,))
    first, second = read(target, state, PROMPT[:7]), read(target, state, PROMPT[7:])
    assert_close(second.logits[0, 0], plain(target.model, PROMPT)[-1], family)
    whole = read(target, target.start(1, 16, (0,)), PROMPT)
    assert_close(torch.cat([first.taps, second.taps], dim=1), whole.taps, family)


def test_an_empty_prompt_is_refused(device):
    target = shared_target("llama", torch.float32, device)
    with pytest.raises(InputError, match="the prompt is empty: expected at least one token"):
        target.prefill(target.start(1, 16, ()), torch.empty(1, 0, dtype=torch.int64, device=device))


def test_one_sequence_at_a_time():
    target = shared_target("llama", torch.float32, "cpu")
    with pytest.raises(InputError, match="expected 1 row, found 2"):
        target.start(2, 16, ())
