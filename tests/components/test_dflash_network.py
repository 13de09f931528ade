"""The drafter's network: what it joins into one product is what its layers compute one by one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config

from treeflash.components.drafters import dflash_network
from treeflash.components.drafters.dflash_network import DFlashNetwork, _rotate
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.rounding import difference

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 11,
}
CONTEXT, BLOCK = 7, 5


def network(dtype, bias=False):
    made = DFlashNetwork(Qwen3Config(**SIZES, attention_bias=bias), 2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.empty(weight.shape).normal_(std=0.4, generator=generator))
    return made.to(dtype).eval()


def draft(made, dtype):
    """Context keys and values, written in two goes, and the hidden states of a block behind them."""
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(1, CONTEXT, 64, generator=generator).to(dtype)
    block = torch.randn(1, BLOCK, 32, generator=generator).to(dtype)
    cache = torch.zeros(3, 2, 1, 2, 20, 8, dtype=dtype)
    with torch.inference_mode():
        made.write_context(taps[:, :6], cache, 0)
        made.write_context(taps[:, 6:], cache, 6)
        context = cache[..., :CONTEXT, :].clone()
        return taps, block, context, made(block, cache, CONTEXT)[0]


def one_by_one(made, taps, block):
    """The same, layer by layer and map by map."""
    with torch.inference_mode():
        context = made.hidden_norm(made.fc(taps))
        before, (cos, sin) = made.positions(context, 0), made.positions(block, CONTEXT)
        kept, states = [], block
        for layer in made.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(states)
            old, new = attention.keys_values(context, *before), attention.keys_values(normed, cos, sin)
            kept.append(torch.stack(old))
            keys, values = (torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
            queries = attention.q_norm(attention.q_proj(normed).view(1, BLOCK, 4, 8)).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(
                _rotate(queries, cos, sin), keys, values, enable_gqa=True
            )
            states = states + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return torch.stack(kept), states


def check(made, dtype):
    taps, block, context, states = draft(made, dtype)
    expected = one_by_one(made, taps, block)
    for found, wanted in ((context, expected[0]), (states, expected[1])):
        # In bfloat16 products are rounded otherwise over blocks; a wrong head or row is far outside.
        assert difference(found, wanted) < (0.1 if dtype == torch.bfloat16 else 1e-5)
    return states


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_joined_maps_are_the_layers_own(dtype, bias):
    check(network(dtype, bias), dtype)


def test_a_long_context_is_written_in_pieces(monkeypatch):
    made = network(torch.float32)
    whole = draft(made, torch.float32)
    monkeypatch.setattr(dflash_network, "_CONTEXT_PIECE", 2)
    for mine, theirs in zip(draft(made, torch.float32), whole, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_changed_between_drafts_counts(dtype):
    made = network(dtype)
    before = check(made, dtype)
    with torch.no_grad():
        made.layers[1].self_attn.k_proj.weight.mul_(-2)
        made.layers[2].self_attn.k_norm.weight.mul_(-1)
    assert not torch.equal(check(made, dtype), before)


class Adapted(nn.Module):
    """A map with something added to it, whose `weight` is the map's alone."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    @property
    def weight(self):
        return self.base.weight

    def forward(self, states):
        return -3 * self.base(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_has_come_in_a_maps_place_is_used(dtype):
    made = network(dtype)
    before = check(made, dtype)
    attention = made.layers[0].self_attn
    attention.v_proj = Adapted(attention.v_proj)
    adapted = check(made, dtype)
    assert not torch.equal(adapted, before)
    attention.v_proj = attention.v_proj.base
    assert torch.equal(check(made, dtype), before)
    hook = attention.k_proj.register_forward_hook(lambda module, args, out: -out)
    assert not torch.equal(check(made, dtype), before)
    hook.remove()
    attention.k_proj.forward = lambda states: -functional.linear(states, attention.k_proj.weight)
    assert not torch.equal(check(made, dtype), before)
    del attention.k_proj.forward
    assert torch.equal(check(made, dtype), before)
    hook = attention.k_norm.register_forward_hook(lambda module, args, out: -out)
    assert not torch.equal(check(made, dtype), before)
    hook.remove()
    attention.q_proj = copy.deepcopy(attention.q_proj)
    with torch.no_grad():
        attention.q_proj.weight.neg_()
    assert not torch.equal(check(made, dtype), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_are_cut_are_not_multiplied(dtype):
    made = network(dtype)
    taps, _, context, _ = draft(made, dtype)
    made.layers = made.layers[:2]
    cache = torch.zeros(2, 2, 1, 2, 20, 8, dtype=dtype)
    with torch.inference_mode():
        made.write_context(taps, cache, 0)
    assert difference(cache[..., :CONTEXT, :], context[:2]) < 0.01


def test_a_drafter_with_layers_cut_decodes():
    registry = Registry.load()
    decoder = Recipe.load("tiny-ddtree", registry).build(registry)
    prompt = [5, 9, 7, 3]
    expected = decoder.generate(prompt, max_new_tokens=20).token_ids
    network = decoder.drafter.network
    network.layers = network.layers[:1]
    assert decoder.generate(prompt, max_new_tokens=20).token_ids == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_copy_has_maps_of_its_own(dtype):
    made = network(dtype)
    before = check(made, dtype)
    other = copy.deepcopy(made)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.5)
    assert not torch.equal(check(other, dtype), before)
    assert torch.equal(check(made, dtype), before)
    assert list(other.state_dict()) == list(made.state_dict())


@pytest.mark.parametrize("fill", [0.0, torch.nan])
def test_rows_that_differ_in_length_are_read_as_each_alone(fill):
    """Whatever stands behind the shorter ones."""
    made = network(torch.float64)
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(3, 8, 64, generator=generator, dtype=torch.float64)
    blocks = torch.randn(3, BLOCK, 32, generator=generator, dtype=torch.float64)
    cache = torch.full((3, 2, 3, 2, 20, 8), fill, dtype=torch.float64)
    first, more = torch.tensor([3, 5, 1]), torch.tensor([3, 1, 2])
    with torch.inference_mode():
        made.write_context(taps[:, :5], cache, 0)
        places = first[:, None, None] + torch.arange(3)[:, None]
        made.write_context(taps.gather(1, places.expand(-1, -1, 64)), cache, first)
        if fill != 0:
            for row, length in enumerate((first + more).tolist()):
                cache[:, :, row, :, length:] = fill
        together = made(blocks, cache, first + more)
        for row, length in enumerate((first + more).tolist()):
            alone = torch.full((3, 2, 1, 2, 20, 8), fill, dtype=torch.float64)
            made.write_context(taps[row : row + 1, :length], alone, 0)
            for found, expected in zip(together, made(blocks[row : row + 1], alone, length), strict=True):
                torch.testing.assert_close(found[row : row + 1], expected)
