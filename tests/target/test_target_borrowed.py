"""The model is borrowed: whatever happens in a pass, its owner finds it as it was."""

import inspect

import pytest
import torch
from transformers import AttentionInterface, Gemma3Config, Gemma3ForConditionalGeneration

from treeflash.errors import UnsupportedTargetError
from treeflash.target import HuggingFaceTarget, wrap_model
from treeflash.testing.families import FAMILIES, tiny_model
from treeflash.tree import TokenTree

from .target_helpers import BROAD_PROMPT, row


def condition(model) -> dict:
    """All that an owner could notice, except for the weights' values."""
    modules = list(model.named_modules())
    return {
        "config": model.config.to_dict(),
        "generation": model.generation_config.to_dict(),
        "attention": model.config._attn_implementation,
        "training": {name: module.training for name, module in modules},
        "hooks": {
            name: [len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks)]
            for name, module in modules
        },
        "gradients": {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()},
        "storage": {name: tensor.data_ptr() for name, tensor in model.state_dict().items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules},
    }


def use(target: HuggingFaceTarget) -> None:
    """Every kind of pass, with taps."""
    state = target.start(1, 32, (0, target.num_layers - 1))
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], device=target.device)
    with torch.no_grad():
        target.prefill(state, row(BROAD_PROMPT, target.device))
        target.verify(state, tree)
        target.commit(state, [[0, 2, 3]])
        target.verify(state, tree)
        target.rewind(state, torch.tensor([3]))
        target.project(target.embed(row([1, 2], target.device)))


def mixed(model):
    """Puts every third module into the other mode than the rest, and freezes the embedding."""
    for number, module in enumerate(model.modules()):
        module.training = number % 3 != 1
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


@pytest.fixture
def seen(monkeypatch):
    """Records the attention implementation and the modules in training mode of each pass."""

    def watch(model, fail=False):
        forward, passes = model.forward, []

        def spy(*args, **inputs):
            training = [name for name, module in model.named_modules() if module.training]
            passes.append((model.config._attn_implementation, training))
            if fail:
                raise RuntimeError("out of memory")
            return forward(*args, **inputs)

        monkeypatch.setattr(model, "forward", spy)
        return passes

    return watch


@pytest.mark.parametrize("family", FAMILIES)
def test_an_evaluating_model_is_given_back(family, device):
    model = tiny_model(family, device=device)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = condition(model)
    target = wrap_model(model)
    assert condition(model) == before
    use(target)
    assert condition(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_a_training_model_is_given_back_module_by_module(family, device):
    model = mixed(tiny_model(family, device=device))
    before = condition(model)
    target = wrap_model(model)
    assert condition(model) == before
    use(target)
    assert condition(model) == before


def test_a_model_read_with_eager_attention_is_given_back(seen):
    # Gemma 2 has no SDPA path; its owner may have chosen another.
    model = tiny_model("gemma2")
    target = wrap_model(model)
    model.set_attn_implementation("flex_attention")
    mixed(model)
    passes, before = seen(model), condition(model)
    use(target)
    assert passes == [("eager", [])] * 3
    assert condition(model) == before


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
def test_attention_that_cannot_be_set_leaves_the_modes(family):
    model = mixed(tiny_model(family))
    before = condition(model)
    assert wrap_model(model).attention == "eager"
    assert condition(model) == before


def test_other_attention_is_replaced_during_the_pass_alone(seen, device):
    model = tiny_model("llama", attn_implementation="eager", device=device)
    target = HuggingFaceTarget(model)
    passes, before = seen(model), condition(model)
    assert before["attention"] == "eager"
    use(target)
    assert passes == [("sdpa", [])] * 3
    assert condition(model) == before


def test_the_callers_own_attention_is_replaced_during_the_pass_alone(seen):
    def loud(*args, **kwargs):
        raise AssertionError("a tree was read with attention that may not take its mask")

    AttentionInterface.register("loud", loud)
    model = tiny_model("qwen3")
    model.set_attn_implementation("loud")
    target = wrap_model(model, lean=False)
    passes, before = seen(model), condition(model)
    assert before["attention"] == "loud"
    use(target)
    assert passes == [("sdpa", [])] * 3
    assert condition(model) == before
    with pytest.raises(AssertionError, match="a tree was read"):
        model(row([1, 2], "cpu"))


def composite():
    """A language model with an image model in front of it, each with a config of its own."""
    text = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    image = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    tokens = {"image_token_index": 39, "boi_token_index": 38, "eoi_token_index": 37}
    config = Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4, **tokens)
    return Gemma3ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    ("outer", "text", "image"),
    [("eager", "eager", "sdpa"), ("sdpa", "eager", "sdpa"), ("eager", "sdpa", "eager")],
)
def test_a_model_of_several_keeps_each_ones_attention(monkeypatch, outer, text, image):
    model = composite()
    model.set_attn_implementation({"": outer, "text_config": text, "vision_config": image})
    configs = [model.config, model.config.text_config, model.config.vision_config]
    target = wrap_model(model)
    assert [config._attn_implementation for config in configs] == [outer, text, image]
    during, forward = [], model.forward

    def spy(**inputs):
        during.append(configs[1]._attn_implementation)
        return forward(**inputs)

    monkeypatch.setattr(model, "forward", spy)
    use(target)
    assert during == ["sdpa"] * 3
    assert [config._attn_implementation for config in configs] == [outer, text, image]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_target_reads_with_the_attention_it_was_made_with(seen, attention):
    model = tiny_model("mistral")
    target = HuggingFaceTarget(model, attention=attention)
    passes = seen(model)
    use(target)
    assert passes == [(attention, [])] * 3


def test_training_modules_are_off_during_the_pass(seen):
    model = mixed(tiny_model("gpt2"))
    target = HuggingFaceTarget(model)
    passes = seen(model)
    use(target)
    assert passes == [("sdpa", [])] * 3


def test_a_training_module_in_an_evaluating_model_is_off_during_the_pass(seen):
    # Dropout that is left on makes the logits random: nothing is lossless then.
    model = tiny_model("gpt2")
    target = HuggingFaceTarget(model)
    model.transformer.drop.train()
    passes, before = seen(model), condition(model)
    use(target)
    assert passes == [("sdpa", [])] * 3
    assert condition(model) == before


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_pass_that_fails_gives_the_model_back(seen, train):
    model = tiny_model("gpt2", attn_implementation="eager")
    model = mixed(model) if train else model
    target = HuggingFaceTarget(model)
    state = target.start(1, 16, (0, 1))
    passes = seen(model, fail=True)
    before = condition(model)
    with pytest.raises(RuntimeError, match="out of memory"):
        target.prefill(state, row([1, 2, 3], "cpu"))
    with pytest.raises(RuntimeError, match="out of memory"):
        target.verify(state, TokenTree.from_lists([1, 2], [-1, 0]))
    assert passes == [("sdpa", [])] * 2
    assert condition(model) == before
    assert state.cache.length == 0


def test_a_layer_that_fails_gives_the_model_back():
    model = mixed(tiny_model("llama", attn_implementation="eager"))
    target = HuggingFaceTarget(model)
    state = target.start(1, 16, (0, 1))
    before = condition(model)
    with pytest.raises(IndexError), torch.no_grad():
        target.prefill(state, row([1, 99], "cpu"))  # no such token
    assert condition(model) == before


def test_a_refused_model_is_given_back():
    model = tiny_model("llama", attn_implementation="eager")
    forward = model.forward

    def forgetful(**inputs):
        return forward(**{**inputs, "position_ids": None})

    forgetful.__signature__ = inspect.signature(forward)
    model.forward = forgetful
    mixed(model)
    before = condition(model)
    with pytest.raises(UnsupportedTargetError):
        wrap_model(model)
    assert condition(model) == before


def test_a_model_can_be_trained_after_it_was_borrowed(device):
    # Tensors made in inference mode and left behind would break the backward pass.
    model = tiny_model("llama", device=device)
    target = wrap_model(model)
    with torch.inference_mode():
        use(target)
    model.train()
    logits = model(input_ids=row(BROAD_PROMPT, device)).logits
    logits.float().logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())
