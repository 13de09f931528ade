"""The lean pass: for which models, of which weights, how exact. What it reads is tested with the others."""

import functools

import pytest
import torch
from torch import nn

from treeflash.target import lean as lean_module
from treeflash.target import wrap_model
from treeflash.target.lean import LeanDecoder
from treeflash.testing.families import FAMILIES, tiny_model
from treeflash.tree import TokenTree

from .target_helpers import BROAD, BROAD_PROMPT, row

KNOWN = {"llama", "mistral", "qwen2", "qwen3"}


def read(target, ids=BROAD_PROMPT):
    """Logits of a prompt's end and of a tree behind it."""
    tree = TokenTree.from_lists(*BROAD, device=target.device)
    with torch.inference_mode():
        state = target.start(1, 100, ())
        last = target.prefill(state, row(ids, target.device)).logits[0]
        return torch.cat([last, target.verify(state, tree).logits[0]]).float()


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families(family, device):
    target = wrap_model(tiny_model(family, device=device))
    assert (target.lean is not None) == (family in KNOWN)
    assert wrap_model(target.model, lean=False).lean is None


class Scaled(nn.Linear):
    """Stands for an adapter."""

    def forward(self, states):
        return 2 * super().forward(states)


def with_adapter(model):
    old = model.model.layers[1].self_attn.q_proj
    new = Scaled(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    model.model.layers[1].self_attn.q_proj = new


def with_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def with_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)


def with_another_forward(model):
    forward = model.forward

    @functools.wraps(forward)
    def doubled(**inputs):
        output = forward(**inputs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled


CHANGES = [with_adapter, with_activation, with_hook, with_another_forward]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_hung_into_a_model_is_not_passed_over(change):
    model = tiny_model("llama")
    plain = read(wrap_model(model))
    change(model)
    target = wrap_model(model)
    assert target.lean is None
    assert not torch.allclose(read(target), plain)


@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_into_a_model_later_is_seen_too(change):
    model = tiny_model("llama")
    target = wrap_model(model)
    plain = read(target)
    change(model)
    assert not torch.allclose(read(target), plain)
    assert target.lean is None


def test_what_is_gone_again_is_passed_over_again():
    model = tiny_model("llama")
    target = wrap_model(model)
    plain, lean = read(target), target.lean
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.allclose(read(target), plain)
    assert not torch.allclose(read(target), plain)
    handle.remove()
    assert torch.equal(read(target), plain)
    assert target.lean is lean


def test_whoever_never_decodes_does_not_hold_weights_twice():
    target = wrap_model(tiny_model("llama", dtype=torch.bfloat16))
    assert target.lean.head.made is None
    read(target)
    blocks = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (target.lean.head.made is not None) == blocks


@pytest.mark.parametrize("family", sorted(KNOWN))
def test_many_rows_are_not_folded_and_come_to_the_same(family, device, monkeypatch):
    target = wrap_model(tiny_model(family, dtype=torch.float64, device=device))
    expected = read(target)
    monkeypatch.setattr(lean_module, "MOST_FOLDED", 0)
    torch.testing.assert_close(read(target), expected)


def test_plain_steps_keep_no_graph(device):
    target = wrap_model(tiny_model("llama", device=device))
    state = target.start(1, 20, (0,))
    outputs = [target.prefill(state, row([1, 2, 3], device))]
    outputs.append(target.verify(state, TokenTree.root_only(torch.tensor([4], device=device))))
    assert not any(part.requires_grad for output in outputs for part in (output.logits, output.taps))


def test_a_gathered_head_is_kept_until_the_weights_change():
    target = wrap_model(tiny_model("llama", dtype=torch.bfloat16))
    columns = torch.tensor([1, 5, 7])
    head = target.head(columns, target.dtype)
    assert target.head(columns.clone(), target.dtype) is head
    assert target.head(columns[:2], target.dtype) is not head
    head = target.head(columns, target.dtype)
    states = torch.randn(2, target.hidden_size).bfloat16()
    # Whoever took it sees the change.
    with torch.no_grad():
        before = head(states)
        target.model.lm_head.weight.mul_(2)
        torch.testing.assert_close(head(states), 2 * before)
        target.model.lm_head.bias = torch.nn.Parameter(torch.arange(target.vocab_size).bfloat16())
        # The sum is rounded once more here.
        torch.testing.assert_close(head(states), 2 * before + columns.bfloat16(), atol=0.1, rtol=0.02)
        target.model.lm_head.bias.zero_()
        torch.testing.assert_close(head(states), 2 * before)


def test_a_head_first_used_while_inferring_can_be_learned_through():
    target = wrap_model(tiny_model("llama"))
    head, states = target.head(torch.tensor([1, 5]), torch.float32), torch.randn(2, target.hidden_size)
    with torch.inference_mode():
        expected = head(states)
    states.requires_grad_()
    found = head(states)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), expected.clone())
    assert states.grad.abs().sum() > 0


@pytest.mark.parametrize("config", [{"attention_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_tied_heads(config, device):
    model = tiny_model("llama", dtype=torch.float64, device=device, **config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.copy_(torch.linspace(-1, 1, len(weight)))
    target = wrap_model(model)
    assert target.lean is not None
    torch.testing.assert_close(read(target), read(wrap_model(model, lean=False)))


def test_a_model_it_reads_wrongly_is_read_by_its_own_forward(monkeypatch):
    monkeypatch.setattr("treeflash.target.lean.rms_norm", lambda states, norm: states)
    model = tiny_model("llama")
    target = wrap_model(model)
    assert target.lean is None
    assert torch.equal(read(target), read(wrap_model(model, lean=False)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("replaced", [False, True])
def test_weights_that_change_are_seen(dtype, replaced, device):
    model = tiny_model("llama", dtype=dtype, device=device)
    target = wrap_model(model)
    before = read(target)
    weight = model.model.layers[1].mlp.down_proj.weight
    if replaced:
        weight.data = weight.data.flip(0).clone()
    else:
        with torch.no_grad():
            weight.copy_(weight.flip(0).clone())
    after = read(target)
    assert not torch.allclose(after, before)
    assert torch.equal(after, read(wrap_model(model)))


@pytest.mark.parametrize("family", sorted(KNOWN))
def test_in_low_precision_it_is_as_exact_as_the_models_own(family, device):
    model = tiny_model(family, vocab_size=200, num_hidden_layers=4, scale=2.0, device=device)
    ids = list(range(5, 60))
    exact = read(wrap_model(model, lean=False), ids)
    model = model.bfloat16()
    lean, own = (read(wrap_model(model, lean=wanted), ids) for wanted in (True, False))
    assert float((lean - exact).square().mean()) < 1.5 * float((own - exact).square().mean())


def test_it_needs_no_mask_for_a_root_alone(monkeypatch, device):
    """And gives what it gives behind one."""
    model = tiny_model("qwen3", dtype=torch.float64, device=device)
    target = wrap_model(model)
    masks = []
    call = LeanDecoder.__call__

    def spy(self, token_ids, positions, mask, *rest, **named):
        masks.append(mask)
        return call(self, token_ids, positions, mask, *rest, **named)

    with torch.inference_mode():
        state = target.start(1, 64, ())
        target.prefill(state, row(BROAD_PROMPT, device))
        monkeypatch.setattr(LeanDecoder, "__call__", spy)
        root = TokenTree.root_only(torch.tensor([3], device=device))
        alone = target.verify(state, root).logits[0, 0]
        pair = target.verify(state, TokenTree.from_lists([3, 4], [-1, 0], device=device)).logits[0, 0]
    assert [mask is None for mask in masks] == [True, False]
    torch.testing.assert_close(alone, pair)
