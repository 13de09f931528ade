"""Tiny random models of many families, for tests that must hold for every target."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_GROUPED = {**_SIZES, "head_dim": 8}
_WINDOW = 5
_MIXED = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The grouped product that experts default to does not know float64.
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "experts_implementation": "eager"}

# Config class and what to give it beside the vocabulary.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GROUPED),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen3": ("Qwen3Config", _GROUPED),
    "qwen3-moe": ("Qwen3MoeConfig", {**_GROUPED, **_MOE, "num_experts": 4}),
    "mistral": ("MistralConfig", {**_GROUPED, "sliding_window": _WINDOW}),
    "gemma2": ("Gemma2Config", {**_GROUPED, **_MIXED, "query_pre_attn_scalar": 8}),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GROUPED, **_MIXED, "query_pre_attn_scalar": 8},
    ),
    "phi3": ("Phi3Config", {**_SIZES, "sliding_window": None}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt-neox": ("GPTNeoXConfig", _SIZES),
    "opt": ("OPTConfig", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo2": ("Olmo2Config", _SIZES),
    "cohere": ("CohereConfig", _SIZES),
    "gpt-oss": (
        "GptOssConfig",
        {**_GROUPED, **_MIXED, **_MOE, "num_local_experts": 4, "rope_parameters": _ROPE},
    ),
}


def tiny_model(
    family: str,
    *,
    vocab_size: int = 40,
    seed: int = 0,
    scale: float = 4.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **changes: Any,
) -> PreTrainedModel:
    """Makes a random model.

    Args:
        family: A key of `FAMILIES`.
        vocab_size: Tokens.
        seed: Of the weights.
        scale: Multiplies the weight matrices: an untouched random model repeats itself.
        dtype: Of the weights.
        device: Where they are.
        **changes: Config keys to give in place of the family's.

    Returns:
        The model, in evaluation mode, without stop tokens.
    """
    name, sizes = FAMILIES[family]
    special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    # With a tied head a random model mostly says again what it has just read.
    special["tie_word_embeddings"] = False
    config = getattr(transformers, name)(vocab_size=vocab_size, **{**special, **sizes, **changes})
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)  # of what is not overwritten below
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for tensor in model.parameters():
            if tensor.ndim > 1:
                spread = scale / tensor.shape[-1] ** 0.5 / 2
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    return model.to(device=device, dtype=dtype).eval()
