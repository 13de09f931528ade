"""Models that cannot be verified in trees are refused, with the reason."""

import inspect
import warnings

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaForCausalLM,
    MambaConfig,
    OpenAIGPTConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
    XLNetConfig,
)

from treeflash.engine import Decoder
from treeflash.errors import TreeflashError, UnsupportedTargetError
from treeflash.target import HuggingFaceTarget, wrap_model
from treeflash.target.probe import probe
from treeflash.testing.families import tiny_model
from treeflash.testing.reference import reference_text

from .target_helpers import BROAD_PROMPT, row

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Config, and what the message must say beside the model's name.
REFUSED = {
    "mamba": (
        lambda: MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4),
        ["recurrent state", "cannot branch"],
    ),
    "bloom": (
        lambda: BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4),
        ["no position_ids", "ALiBi"],
    ),
    "falcon-alibi": (
        lambda: FalconConfig(
            vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        ),
        ["ALiBi"],
    ),
    "gpt-neo": (
        lambda: GPTNeoConfig(
            vocab_size=40,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=64,
        ),
        ["local window", "window_size = 64", "by index"],
    ),
    "qwen3-next": (
        lambda: Qwen3NextConfig(
            **SIZES,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            num_experts=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        ),
        ["linear_attention", "recurrent state"],
    ),
    "recurrent-gemma": (
        lambda: RecurrentGemmaConfig(**SIZES, lru_width=32, attention_window_size=8),
        ["recurrent state"],
    ),
    "llama-4": (
        lambda: Llama4TextConfig(
            **SIZES,
            intermediate_size_mlp=48,
            num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"],
        ),
        ["chunked_attention"],
    ),
    "gpt": (
        lambda: OpenAIGPTConfig(vocab_size=40, n_embd=32, n_layer=2, n_head=4),
        ["no key/value cache", "every token is read again"],
    ),
    "xlnet": (
        lambda: XLNetConfig(vocab_size=40, d_model=32, n_layer=2, n_head=4, d_inner=48),
        ["no key/value cache", "hidden states (mems)"],
    ),
    "rwkv": (
        lambda: RwkvConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32),
        ["no key/value cache", "recurrent state, which cannot branch"],
    ),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused_with_the_reason(family, device):
    make, reasons = REFUSED[family]
    model = AutoModelForCausalLM.from_config(make()).eval().to(device)
    with pytest.raises(UnsupportedTargetError) as caught:
        wrap_model(model)
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} cannot be verified in trees: ")
    assert all(reason in message for reason in reasons), message
    assert isinstance(caught.value, TreeflashError)


def test_falcon_without_alibi_is_taken():
    # So that what is refused above is the ALiBi, not the family.
    config = FalconConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=False
    )
    assert wrap_model(AutoModelForCausalLM.from_config(config).eval()).num_layers == 2


def altered(change):
    """A Llama whose forward goes through `change(forward, inputs)`, unknown to its config."""

    class Altered(LlamaForCausalLM):
        def forward(self, **inputs):
            return change(super().forward, inputs)

        forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)

    return Altered


def the_cache(inputs):
    """The cache by whichever name transformers gives it; None in a forward without one."""
    return inputs.get("cache", inputs.get("past_key_values"))


def counts_by_index(forward, inputs):
    return forward(**{**inputs, "position_ids": None})


def sees_every_row_before(forward, inputs):
    return forward(**{**inputs, "attention_mask": None})


def sees_one_row_too_many(forward, inputs):
    """Wrong in the mask of the tree alone: each node sees the node before it."""
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape[-2] > 1:
        beside = torch.arange(1, mask.shape[-2], device=mask.device)
        mask[..., beside, mask.shape[-1] - mask.shape[-2] + beside - 1] = 0
    return forward(**inputs)


def scales(factor):
    """The same argmax everywhere, other logits once there is a cache: sampling would differ."""

    def change(forward, inputs):
        out = forward(**inputs)
        if the_cache(inputs) is not None:
            out.logits = out.logits * factor
        return out

    return change


def skips_a_layer(forward, inputs):
    """As if one layer kept its keys to itself."""
    cache = the_cache(inputs)
    if cache is not None:
        cache.layers.append(type(cache.layers[0])(cache.extent))
    return forward(**inputs)


def fails_with_a_cache(forward, inputs):
    if the_cache(inputs) is not None:
        raise NotImplementedError("no masks of four axes")
    return forward(**inputs)


UNFAITHFUL = "does not follow the positions and masks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (counts_by_index, UNFAITHFUL),
        (sees_every_row_before, UNFAITHFUL),
        (sees_one_row_too_many, UNFAITHFUL),
        (scales(float("nan")), "logits of a tree are not finite, and those of its paths are"),
        (skips_a_layer, "layers keep no keys and values per position"),
        (fails_with_a_cache, "does not take a tree: NotImplementedError: no masks of four axes"),
    ],
    ids=["positions", "mask", "siblings", "nan", "layer", "error"],
)
def test_the_probe_catches_what_no_config_tells(change, reason, dtype, device):
    model = tiny_model("llama", dtype=dtype, device=device)
    assert probe(HuggingFaceTarget(model)) is None
    model.__class__ = altered(change)
    with pytest.raises(UnsupportedTargetError, match=reason):
        wrap_model(model)


def test_the_probe_compares_logits_and_not_choices():
    model = tiny_model("llama")
    model.__class__ = altered(scales(1.01))
    with pytest.raises(UnsupportedTargetError, match=r"differ from those of its paths by \d\.\de-0[23]"):
        wrap_model(model)


def test_a_reason_that_holds_for_all_attention_is_said_once():
    model = AutoModelForCausalLM.from_config(REFUSED["bloom"][0]()).eval()
    with pytest.raises(UnsupportedTargetError) as caught:
        wrap_model(model)
    assert str(caught.value).count("ALiBi") == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "cohere", "qwen3-moe"])
def test_low_precision_is_no_reason_to_refuse(family, device):
    assert wrap_model(tiny_model(family, dtype=torch.bfloat16, device=device)).dtype == torch.bfloat16


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedTargetError, match=r"found 'gpt2'; load_target\('gpt2'\) loads one$"):
        wrap_model("gpt2")
    with pytest.raises(UnsupportedTargetError, match=r"causal language model, found \{'a': 1\}$"):
        wrap_model({"a": 1})
    with pytest.raises(UnsupportedTargetError, match="tokenizer or None, found 'gpt2'"):
        wrap_model(tiny_model("llama"), "gpt2")


def test_logits_that_are_no_numbers_are_told_as_such(device):
    """Before, as a model that does not follow its masks."""
    for dtype, advice in [
        (torch.float16, "not finite in float16: load it in bfloat16 or float32"),
        (torch.bfloat16, "not finite in bfloat16: load it in float32"),
        (torch.float32, "not finite in float32: check its weights for NaN and infinity"),
    ]:
        model = tiny_model("llama", dtype=dtype, device=device)
        with torch.no_grad():
            model.lm_head.weight[3, 0] = float("nan")
        with pytest.raises(UnsupportedTargetError, match=advice):
            wrap_model(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda model: model.double(), r"was float32 \[40, 32\] on cpu and is float64 \[40, 32\] on cpu"),
        (lambda model: model.to(torch.bfloat16), r"is bfloat16 \[40, 32\] on cpu"),
        (lambda model: model.to("meta"), r"is float32 \[40, 32\] on meta"),
        (lambda model: model.resize_token_embeddings(48), r"is float32 \[48, 32\] on cpu"),
    ],
    ids=["double", "bfloat16", "meta", "resized"],
)
def test_a_model_cast_or_moved_since_it_was_wrapped(family, change, found):
    """It would write another text, as its masks, caches and drafter are for what it was."""
    model = tiny_model(family)
    decoder = Decoder(wrap_model(model))
    decoder.generate(BROAD_PROMPT, max_new_tokens=2)
    change(model)
    with pytest.raises(UnsupportedTargetError, match=f"has changed since it was wrapped: .*{found}; wrap it"):
        decoder.generate(BROAD_PROMPT, max_new_tokens=2)


def test_a_model_cast_back_is_read_again():
    model = tiny_model("llama")
    decoder = Decoder(wrap_model(model))
    model.half().float()
    found = decoder.generate(BROAD_PROMPT, max_new_tokens=12).token_ids
    assert list(found) == reference_text(model, BROAD_PROMPT, 12)
    # One layer is enough to be refused.
    model.model.layers[1].mlp.double()
    with pytest.raises(UnsupportedTargetError, match=r"model.layers.1.mlp.gate_proj.weight was float32"):
        decoder.generate(BROAD_PROMPT, max_new_tokens=2)


class Compiled(torch.nn.Module):
    """Holds a model as `torch.compile` does, which takes seconds to import."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "_orig_mod" else getattr(self._orig_mod, name)

    def forward(self, *args, **kwargs):
        return self._orig_mod(*args, **kwargs)


def quantised(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch moves its quantisation elsewhere
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


def quantised_below_the_head(model):
    model.model = quantised(model.model)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            Compiled,
            "Compiled cannot be verified in trees: it is a wrapper around LlamaForCausalLM: wrap that "
            "model, here model._orig_mod",
        ),
        (torch.nn.DataParallel, "wrapper around LlamaForCausalLM: wrap that model, here model.module"),
        (lambda model: model.to("meta"), "21 of its weights are on the meta device"),
        (quantised, r"torch quantised it: model.layers.0.self_attn.q_proj is a torch\.ao\.nn\.quantized"),
        (quantised_below_the_head, "torch quantised it: model.layers.0.self_attn.q_proj"),
        (lambda model: model.lm_head, "expected a Hugging Face causal language model, found a torch.nn"),
    ],
    ids=["compiled", "parallel", "meta", "quantised", "below the head", "layer"],
)
def test_what_is_no_model_to_read_is_refused_with_the_reason(change, message):
    with pytest.raises(UnsupportedTargetError, match=message):
        wrap_model(change(tiny_model("llama")))


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedTargetError, match="head"):
        wrap_model(tiny_model("llama").model)


@pytest.mark.parametrize("window", [12, 2000])
def test_a_window_that_the_model_ignores_is_noticed(window):
    # Llama reads no sliding_window; a config converted from another family may still name one (and
    # Moshi's does), and prompts beyond it would be read with a window the model does not have.
    model = tiny_model("llama", sliding_window=window)
    ids = row((BROAD_PROMPT * window)[: window + 9], "cpu")
    try:
        target = wrap_model(model)
    except UnsupportedTargetError:
        return
    with torch.no_grad():
        found = target.prefill(target.start(1, window + 9, ()), ids).logits[0, -1]
        expected = model(input_ids=ids, use_cache=False).logits[0, -1]
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
