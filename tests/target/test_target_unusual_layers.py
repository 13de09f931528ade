"""Families whose stack of layers is called or counted otherwise, or passes on something else than a state."""

from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    HrmTextConfig,
    LongcatFlashConfig,
    ModernBertDecoderConfig,
)

from treeflash.components.builders.marginal import Marginal
from treeflash.components.refiners.none import NoRefiner
from treeflash.engine import Decoder
from treeflash.errors import UnsupportedTargetError
from treeflash.target import wrap_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LOW_RANK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS = {
    # Its output head is called decoder.
    "modernbert-decoder": lambda: ModernBertDecoderConfig(
        **SIZES, num_hidden_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2
    ),
    # Two attentions a layer, each with keys of its own.
    "longcat-flash": lambda: LongcatFlashConfig(
        **{key: size for key, size in SIZES.items() if key != "intermediate_size"},
        **LOW_RANK,
        num_layers=2,
        head_dim=8,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
    ),
    # The same layers over and over, with keys of their own each time.
    "hrm-text": lambda: HrmTextConfig(**SIZES, num_hidden_layers=2, H_cycles=2, L_cycles=2),
    # Several states of a token at once.
    "gemma3n": lambda: Gemma3nTextConfig(
        **SIZES,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size_per_layer_input=40,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        num_kv_shared_layers=0,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        activation_sparsity_pattern=[0.0, 0.0],
    ),
}
TAPLESS = {
    "longcat-flash": "no stack of 4 decoder layers was found",
    "hrm-text": "no stack of 12 decoder layers was found",
    "gemma3n": r"expected them as \[1, 7, 32\] for 7 tokens, found \[4, 1, 7, 32\] behind layer 0",
}


@cache
def target_of(family):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]()).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(12)  # an untouched random model repeats itself
    return wrap_model(model)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_text_is_the_targets_own(family):
    target = target_of(family)
    for seed in range(2):
        prompt = [(3 * seed + 7 * place * place) % 37 + 3 for place in range(5 + 14 * seed)]
        plain = reference_text(target.model, prompt, 12)
        drafter = Oracle([*prompt, *plain, *plain], [0.8] * 5, mistake="runner-up", seed=seed)
        result = Decoder(target, drafter, Marginal(), NoRefiner()).generate(
            prompt, max_new_tokens=12, stop_ids=()
        )
        assert list(result.token_ids) == plain


def test_states_are_read_behind_a_head_that_is_called_decoder():
    target = target_of("modernbert-decoder")
    ids = torch.arange(3, 9)
    where = torch.arange(len(ids))
    found = target.read(ids, where, where[:, None] >= where, (0, 1))
    with torch.no_grad():
        expected = target.model(input_ids=ids[None], output_hidden_states=True).hidden_states
    assert torch.allclose(found[:, :32], expected[1][0])


class Reads(Oracle):
    """A drafter that asks for states of the target."""

    tap_layers = (0,)


@pytest.mark.parametrize("family", TAPLESS)
def test_a_drafter_that_reads_states_is_refused_when_composed(family):
    target = target_of(family)
    with pytest.raises(
        UnsupportedTargetError, match=f"states of its layers cannot be read: {TAPLESS[family]}"
    ):
        Decoder(target, Reads([1], [1.0]), Marginal(), NoRefiner())
    where = torch.arange(3)
    with pytest.raises(UnsupportedTargetError, match="cannot be read"):
        target.read(where, where, where[:, None] >= where, (0, 1))
