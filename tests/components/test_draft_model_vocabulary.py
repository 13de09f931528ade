"""Which models may draft for which targets: those whose token ids mean the same."""

from types import SimpleNamespace

import pytest
import torch

from treeflash.components.drafters.draft_model import DraftModel
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import CheckpointError
from treeflash.target import HuggingFaceTarget
from treeflash.testing.reference import reference_text

from .draft_model_helpers import VOCAB, model_of


def speaking(model, *tokens):
    """The model with a tokenizer of these tokens, in the order of their ids."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return HuggingFaceTarget(model.model, SimpleNamespace(get_vocab=lambda: vocabulary))


def test_another_tokenizer_is_refused(device):
    model = model_of("llama", torch.float32, device)
    drafter = DraftModel(speaking(model, "a", "b", "c", "d"))
    with pytest.raises(CheckpointError) as error:
        drafter.bind(speaking(model, "a", "c", "b", "d", "e"))
    assert str(error.value) == (
        "drafter.model: expected the target's tokenizer, found another: 2 of the target's 5 tokens are "
        "others here, the first is 1: 'c' there, 'b' here"
    )


def test_tokens_that_one_side_has_more_are_harmless(device):
    model = model_of("llama", torch.float32, device)
    DraftModel(speaking(model, "a", "b")).bind(speaking(model, "a", "b", "c"))
    DraftModel(speaking(model, "a", "b", "c")).bind(speaking(model, "a", "b"))


def test_vocabularies_are_compared_once_for_each_tokenizer(device):
    model = model_of("llama", torch.float32, device)
    asked = []
    text = {"a": 0}
    target = HuggingFaceTarget(model.model, SimpleNamespace(get_vocab=lambda: asked.append(0) or text))
    drafter = DraftModel(speaking(model, "a"))
    for _ in range(3):
        drafter.bind(target)
    assert len(asked) == 1
    with pytest.raises(CheckpointError):
        drafter.bind(speaking(model, "b"))


def test_without_tokenizers_sizes_are_compared(device):
    target = model_of("llama", torch.float32, device, vocab_size=48)
    with pytest.raises(CheckpointError) as error:
        DraftModel(model_of("llama", torch.float32, device)).bind(target)
    assert str(error.value) == (
        "drafter.model: expected the target's vocabulary of 48 tokens, found 40 (without a tokenizer beside "
        "both models, their sizes are all there is to compare)"
    )


@pytest.mark.parametrize("sizes", [(40, 48), (48, 40)], ids=["drafter padded", "target padded"])
def test_a_padded_vocabulary_fits(sizes, device):
    target_size, size = sizes
    target = speaking(model_of("llama", torch.float64, device, seed=0, vocab_size=target_size), "a", "b")
    drafter = DraftModel(speaking(model_of("gpt2", torch.float64, device, vocab_size=size), "a", "b"))
    # A random model writes tokens of its padding too, which the other one does not have.
    prompt = [3, target_size - 1, 4]
    result = Decoder(target, drafter, selector=OptTree(5)).generate(prompt, max_new_tokens=40)
    assert list(result.token_ids) == reference_text(target.model, prompt, 40)
    assert (max(result.token_ids) >= 40) == (target_size == 48)


def test_another_device_is_refused():
    drafter = DraftModel(model_of("llama", torch.float32, "cpu"))
    target = SimpleNamespace(device=torch.device("cuda:7"), vocab_size=VOCAB)
    with pytest.raises(CheckpointError, match="expected it on the target's device cuda:7, found it on cpu"):
        drafter.bind(target)
