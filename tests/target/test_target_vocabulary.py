"""Embeddings and heads with more rows than there are tokens, and the other sizes a drafter asks for."""

import pytest
import torch
from torch import nn

from treeflash.target import wrap_model
from treeflash.testing.families import FAMILIES, tiny_model

from .target_helpers import assert_close, plain, row


def resized(model, embedding: int, head: int):
    """Gives a model an embedding and a head of their own sizes."""
    hidden = model.config.hidden_size
    old = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(1)

    def table(rows: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(rows, hidden, generator=generator).to(old))

    model.get_input_embeddings().weight = table(embedding)
    model.get_output_embeddings().weight = table(head)
    return model


@pytest.mark.parametrize(("embedding", "head"), [(40, 40), (48, 40), (40, 48), (64, 64)])
def test_the_vocabulary_is_what_can_be_embedded_and_projected(embedding, head, device):
    model = resized(tiny_model("llama", device=device), embedding, head)
    target = wrap_model(model)
    assert target.vocab_size == target.fingerprint().vocab_size == min(embedding, head)
    with torch.no_grad():
        ids = torch.tensor([[0, target.vocab_size - 1]], device=device)
        assert target.project(target.embed(ids)).shape == (1, 2, head)


def test_padding_rows_do_not_move_the_other_logits(device):
    # As when 151,936 rows are laid out for 151,669 tokens: the model's text never holds the rest.
    small = tiny_model("qwen3", dtype=torch.float64, device=device)
    wide = tiny_model("qwen3", dtype=torch.float64, device=device)
    with torch.no_grad():
        for module in (wide.get_input_embeddings(), wide.get_output_embeddings()):
            module.weight = nn.Parameter(torch.cat([module.weight, torch.zeros_like(module.weight[:8])]))
        target = wrap_model(wide)
        found = target.prefill(target.start(1, 8, ()), row([1, 2, 3], device)).logits[0]
    assert target.vocab_size == 48
    assert_close(found[:, :40], plain(small, [1, 2, 3])[-1:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt-neox"])
def test_embedding_and_head_are_the_models_own(family, device):
    target = wrap_model(tiny_model(family, device=device))
    ids = torch.tensor([[3, 1], [4, 1]], device=device)
    with torch.no_grad():
        embedded = target.embed(ids)
        assert embedded.shape == (2, 2, 32)
        assert torch.equal(embedded, target.model.get_input_embeddings().weight[ids])
        head = target.model.get_output_embeddings()
        assert torch.equal(target.project(embedded), head(embedded))


def test_projected_taps_of_the_last_layer_are_the_logits(device):
    target = wrap_model(tiny_model("qwen3", dtype=torch.float64, device=device))
    with torch.no_grad():
        output = target.prefill(target.start(1, 8, (1,)), row([1, 2, 3], device))
        assert_close(target.project(output.taps[:, -1:]), output.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_are_the_configs(family):
    target = wrap_model(tiny_model(family))
    facts = target.fingerprint()
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (32, 2, 40)
    assert (target.hidden_size, target.num_layers, target.max_positions) == (32, 2, 256)
    assert target.stop_ids == ()


@pytest.mark.parametrize(("family", "theta"), [("llama", 10000.0), ("gpt2", None), ("opt", None)])
def test_the_rotary_base_is_named_where_there_is_one(family, theta):
    assert wrap_model(tiny_model(family)).fingerprint().rope_theta == theta


def test_another_rotary_base_is_told():
    model = tiny_model("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    assert wrap_model(model).fingerprint().rope_theta == 5000.0


@pytest.mark.parametrize(
    ("generation", "config", "stops"),
    [(None, None, ()), (7, None, (7,)), ([7, 3], 5, (7, 3)), (None, 5, (5,)), (0, None, (0,))],
)
def test_stop_tokens_come_from_the_generation_settings_first(generation, config, stops):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = generation
    model.config.eos_token_id = config
    assert wrap_model(model).stop_ids == stops


def test_a_model_without_generation_settings_has_its_configs_stop_token():
    model = tiny_model("llama", eos_token_id=5)
    model.generation_config = None
    assert wrap_model(model).stop_ids == (5,)
