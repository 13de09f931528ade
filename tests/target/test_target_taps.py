"""Hidden states of the layers asked for, and of no other."""

import copy

import pytest
import torch
from torch import nn

from treeflash.target import HuggingFaceTarget
from treeflash.target.taps import decoder_layers, tapped
from treeflash.testing.families import tiny_model
from treeflash.tree import TokenTree

from .target_helpers import BROAD, BROAD_PROMPT, READINGS, assert_close, at_nodes, row, shared_target


def hidden_states(model, layers):
    """Reads sequences and gives `hidden_states[l + 1]` side by side, a row per position."""

    def read(ids):
        with torch.no_grad():
            out = model(input_ids=row(ids, model.device), use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)

    return read


def hooks(model) -> list[str]:
    """Names of the modules with a forward hook, once for each hook."""
    return [name for name, module in model.named_modules() for _ in module._forward_hooks]


@pytest.fixture
def hooked_during_a_pass(monkeypatch):
    """Reads a prompt and a tree; gives the modules that had hooks meanwhile, pass by pass."""

    def run(model, layers):
        target = HuggingFaceTarget(model)
        forward, seen = model.forward, []

        def spy(**inputs):
            seen.append(hooks(model))
            return forward(**inputs)

        monkeypatch.setattr(model, "forward", spy)
        state = target.start(1, 16, layers)
        with torch.no_grad():
            target.prefill(state, row([1, 2, 3], model.device))
            target.verify(state, TokenTree.from_lists([4, 5, 6], [-1, 0, 0], device=model.device))
        return seen

    return run


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1), (1, 0), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("family", READINGS)
def test_taps_are_the_models_hidden_states(family, layers, device):
    target = shared_target(family, torch.float64, device)
    # Asking for hidden states may leave transformers' own hooks behind: on a copy.
    read = hidden_states(copy.deepcopy(target.model), layers)
    tree = TokenTree.from_lists(*BROAD, device=device)
    state = target.start(1, 32, layers)
    with torch.no_grad():
        prompt_taps = target.prefill(state, row(BROAD_PROMPT, device)).taps
        tree_taps = target.verify(state, tree).taps
    assert prompt_taps.dtype == tree_taps.dtype == torch.float64
    assert_close(prompt_taps[0], read(BROAD_PROMPT), family)
    assert_close(tree_taps[0], at_nodes(tree, BROAD_PROMPT, read), family)


def test_the_order_asked_for_is_the_order_given(device):
    layers = (3, 0, 2, 2)
    model = tiny_model("llama", num_hidden_layers=5, dtype=torch.float64, device=device)
    target = HuggingFaceTarget(model)
    with torch.no_grad():
        found = target.prefill(target.start(1, 16, layers), row(BROAD_PROMPT, device)).taps[0]
    assert_close(found, hidden_states(model, layers)(BROAD_PROMPT))


def test_no_layers_give_no_taps(device):
    target = shared_target("llama", torch.float32, device)
    state = target.start(1, 16, ())
    with torch.no_grad():
        assert target.prefill(state, row([1, 2], device)).taps is None
        assert target.verify(state, TokenTree.from_lists([3], [-1], device=device)).taps is None


def test_only_the_layers_asked_for_get_hooks(hooked_during_a_pass):
    model = tiny_model("llama", num_hidden_layers=5)
    wanted = ["model.layers.1", "model.layers.3"]
    assert hooked_during_a_pass(model, (3, 1)) == [wanted, wanted]
    assert hooks(model) == []


def test_the_last_layer_is_tapped_behind_the_final_norm(hooked_during_a_pass):
    model = tiny_model("qwen3", num_hidden_layers=3)
    assert hooked_during_a_pass(model, (2, 0)) == [["model", "model.layers.0"]] * 2
    assert hooks(model) == []


def test_plain_decoding_needs_no_hooks(hooked_during_a_pass):
    assert hooked_during_a_pass(tiny_model("gpt2"), ()) == [[], []]


def test_the_callers_hooks_stay(device):
    model = tiny_model("llama", device=device)
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    target = HuggingFaceTarget(model)
    with torch.no_grad():
        target.prefill(target.start(1, 16, (0, 1)), row([1, 2], device))
    assert hooks(model) == ["model.layers.0"]
    assert calls == [1]
    handle.remove()


def test_hooks_go_when_a_pass_fails():
    layer = nn.Linear(2, 2)
    with pytest.raises(RuntimeError), tapped(layer, [layer, None]):
        layer(torch.zeros(1, 3))
    assert not layer._forward_hooks


def test_layers_are_the_list_of_their_number():
    stack = nn.ModuleDict(
        {"experts": nn.ModuleList([nn.Identity()] * 2), "h": nn.ModuleList([nn.Identity()] * 3)}
    )
    assert decoder_layers(stack, 3) is stack["h"]
    assert decoder_layers(stack, 4) is None
