"""Distributions made of hidden states are the model's own, or the model is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, HyperCLOVAXConfig

from treeflash.errors import UnsupportedTargetError
from treeflash.target import HuggingFaceTarget, load_target
from treeflash.target.own_logits import require_own_logits
from treeflash.testing.families import FAMILIES, tiny_model

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
IDS = torch.tensor([3, 7, 9, 4, 5, 6, 8, 2, 1])


def scaled(config_class, dtype, **changes):
    """A random model whose logits are a few nats apart."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_class(**{**SIZES, **changes}), dtype=torch.float32)
        model.get_output_embeddings().weight.data.normal_(std=0.5)
    return HuggingFaceTarget(model.to(dtype).eval())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_are_what_they_say(family, dtype):
    require_own_logits(HuggingFaceTarget(tiny_model(family, dtype=dtype), attention="eager"), IDS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_that_divides_is_known_and_one_that_multiplies_is_not(dtype):
    require_own_logits(scaled(GraniteConfig, dtype, logits_scaling=8.0), IDS)
    require_own_logits(scaled(HyperCLOVAXConfig, dtype, logits_scaling=1.0), IDS)
    for scale in (0.125, 0.9, 8.0):
        with pytest.raises(
            UnsupportedTargetError, match="HyperCLOVAXForCausalLM cannot be learned from or comp"
        ):
            require_own_logits(scaled(HyperCLOVAXConfig, dtype, logits_scaling=scale), IDS)


def test_whatever_changes_logits_is_seen(models):
    target = load_target(models / "tiny-target", dtype="float32", device="cpu")
    require_own_logits(target, IDS)

    def softer(model, arguments, output):
        output.logits = output.logits / 2
        return output

    def masked(model, arguments, output):
        output.logits[..., 5] = -torch.inf
        return output

    for change in (softer, masked):
        handle = target.model.register_forward_hook(change)
        with pytest.raises(UnsupportedTargetError, match="Qwen3ForCausalLM cannot be learned from"):
            require_own_logits(target, IDS)
        handle.remove()
        require_own_logits(target, IDS)
