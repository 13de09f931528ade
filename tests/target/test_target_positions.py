"""How far a target reads: the limit that each kind of rotary positions sets, and texts up to it."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Llama4TextConfig, LlamaConfig, Ministral3Config

from treeflash.components.builders.marginal import Marginal
from treeflash.components.refiners.none import NoRefiner
from treeflash.engine import Decoder
from treeflash.errors import InputError, UnsupportedTargetError
from treeflash.target import hugging_face, wrap_model
from treeflash.target.config_facts import max_positions, rope_theta, stop_ids
from treeflash.testing.families import tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text

PLAIN = {"rope_type": "default"}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 24,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Tables beside max_position_embeddings = 64, and how far trees may reach.
TABLES: dict[str, tuple[dict[str, Any], int]] = {
    "default": (PLAIN, 64),
    "linear": ({"rope_type": "linear", "factor": 4.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, 64),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 32}, 64),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    "yarn-unnamed": ({"rope_type": "yarn", "factor": 2.5}, 160),
    "yarn-counted-in": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    "longrope": (LONG, 24),
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def model_with(kind: str, nested: bool):
    """A model with one table, or with that table for its full layers alone."""
    table = {"rope_theta": 10000.0, **TABLES[kind][0]}
    if nested:
        table = {"full_attention": table, "sliding_attention": {"rope_theta": 5000.0, **PLAIN}}
    family = "gemma3" if nested else "llama"
    return tiny_model(family, dtype=torch.float64, max_position_embeddings=64, rope_parameters=table)


@cache
def target_with(kind: str, nested: bool):
    return wrap_model(model_with(kind, nested))


@pytest.mark.parametrize("nested", [False, True], ids=["one-table", "by-kind-of-layer"])
@pytest.mark.parametrize("kind", TABLES)
def test_the_limit_is_how_far_trees_may_reach(kind, nested):
    assert target_with(kind, nested).max_positions == TABLES[kind][1]


@settings(max_examples=24)
@given(
    kind=st.sampled_from(sorted(TABLES)),
    nested=st.booleans(),
    left=st.integers(1, 9),
    seed=st.integers(0, 9),
    rates=st.lists(st.sampled_from([0.5, 1.0]), min_size=1, max_size=7),
)
def test_texts_are_the_targets_own_up_to_the_last_position(kind, nested, left, seed, rates):
    target = target_with(kind, nested)
    length = target.max_positions - left
    prompt = [(seed + 7 * place * place) % 40 for place in range(length)]
    plain = reference_text(target.model, prompt, left)
    drafter = Oracle([*prompt, *plain, *plain], rates, mistake="runner-up")
    result = Decoder(target, drafter, Marginal(), NoRefiner()).generate(prompt, max_new_tokens=100)
    assert (list(result.token_ids), result.stop_reason) == (plain, "position_limit")


@pytest.mark.parametrize("nested", [False, True], ids=["one-table", "by-kind-of-layer"])
@pytest.mark.parametrize(("kind", "limit"), [("longrope", 25), ("longrope", 64), ("dynamic", 66)])
def test_a_limit_beyond_a_switch_is_noticed_when_the_model_is_wrapped(kind, limit, nested, monkeypatch):
    """As if a config could name a switch in a way that is not known."""
    monkeypatch.setattr(hugging_face, "max_positions", lambda config: limit)
    with pytest.raises(UnsupportedTargetError, match=f"positions up to {limit - 1} differ"):
        wrap_model(model_with(kind, nested))


def test_a_table_of_positions_that_ends_early_is_noticed(monkeypatch):
    monkeypatch.setattr(hugging_face, "max_positions", lambda config: 100)
    with pytest.raises(UnsupportedTargetError, match="does not take a tree: IndexError"):
        wrap_model(tiny_model("gpt2", n_positions=64))


@pytest.mark.parametrize(
    "config",
    [
        Llama4TextConfig(
            **SIZES,
            intermediate_size_mlp=48,
            num_local_experts=2,
            layer_types=["full_attention"] * 2,
            no_rope_layers=[0, 1],
            attn_temperature_tuning=True,
            floor_scale=16,
            attn_scale=2.0,
        ),
        Ministral3Config(
            **SIZES,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.5,
            },
        ),
    ],
    ids=["llama-4", "ministral-3"],
)
def test_scores_that_are_scaled_by_position_are_taken(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    target = wrap_model(model)
    prompt = [(7 * place * place) % 40 for place in range(10)]
    plain = reference_text(model, prompt, 54)
    drafter = Oracle([*prompt, *plain, *plain], [0.8] * 5, mistake="runner-up")
    result = Decoder(target, drafter, Marginal(), NoRefiner()).generate(prompt, max_new_tokens=100)
    assert list(result.token_ids) == plain


def test_a_base_is_told_when_all_layers_have_it():
    assert rope_theta(LlamaConfig(rope_parameters={"rope_theta": 5.0, **PLAIN})) == 5.0
    assert rope_theta(model_with("default", True).config) is None
    assert rope_theta(tiny_model("gpt2").config) is None


@pytest.mark.parametrize("length", [0, -1, 2**63])
def test_a_length_that_is_none_is_an_error(length):
    config = LlamaConfig()
    config.max_position_embeddings = length
    with pytest.raises(InputError, match="max_position_embeddings: expected a number of positions, found"):
        max_positions(config)


@pytest.mark.parametrize("stop", ["</s>", 2.0, [2, "3"], [[2]], True, -1, {"id": 2}])
def test_stop_tokens_that_are_no_token_ids_are_an_error(stop):
    model = tiny_model("llama")
    model.generation_config = type("Generation", (), {"eos_token_id": stop})()
    with pytest.raises(InputError, match="eos_token_id: expected a token id or a list of token ids, found"):
        stop_ids(model)


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), (2, (2,)), ([2, 3], (2, 3)), ([], ())])
def test_stop_tokens_are_read(stop, expected):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = stop
    assert stop_ids(model) == expected
