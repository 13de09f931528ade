"""Configs of drafters that share the DFlash layout and compute something else: refused, by what says so."""

import pytest
import torch

from treeflash.checkpoints.dflash_layout import read_facts
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.errors import CheckpointError
from treeflash.target_interface import TargetFacts

TARGET = TargetFacts(hidden_size=64, num_layers=4, vocab_size=128, rope_theta=10000.0)
OTHERS = {
    "causal": True,
    "is_causal": True,
    "sample_from_anchor": True,
    "query_zero_predicts_next": True,
    "shift_label": True,
    "projector_type": "domino",
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "use_confidence_head": True,
    "enable_confidence_head": True,
    "use_aux_hidden_state": False,
    "use_swa": True,
    "sliding_window_non_causal": True,
    "attention_sink_bias": True,
    "mlp_bias": True,
    "input_embedding_scale": 0.5,
    "output_multiplier": 2.0,
    "final_logit_softcapping": 30.0,
}


@pytest.fixture
def config(checkpoint_files):
    return checkpoint_files.shipped().config


def faults_of(config, target=TARGET):
    return read_facts(config, target)[1]


@pytest.mark.parametrize("table", ["", "dflash_config"])
@pytest.mark.parametrize("key", OTHERS)
def test_a_setting_of_another_drafter_is_refused_wherever_it_stands(key, table, config):
    place = config[table] if table else config
    place[key] = OTHERS[key]
    (fault,) = faults_of(config)
    assert fault.startswith(f"{table}.{key}: expected " if table else f"{key}: expected ")
    assert "not supported" in fault
    # What says that it is none of these, or nothing at all, is read.
    place[key] = None
    assert faults_of(config) == []
    if isinstance(OTHERS[key], bool):
        place[key] = not OTHERS[key]
        assert faults_of(config) == []
        # JSON's numbers are none of its truth values.
        place[key] = int(not OTHERS[key])
        assert len(faults_of(config)) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("projector_type", "dflash"), ("markov_rank", 0), ("output_multiplier", 1.0)]
)
def test_a_setting_of_this_drafter_is_read(key, value, config):
    config["dflash_config"][key] = value
    assert faults_of(config) == []


@pytest.mark.parametrize(
    ("table", "key", "hint"),
    [
        ("dflash_config", "linear_context", ""),
        ("dflash_config", "mask_token", "; did you mean 'mask_token_id'?"),
        ("dflash_config", "layer_ids", "; did you mean 'target_layer_ids'?"),
        (
            "treeflash_config",
            "ar_aproximation",
            "; did you mean 'ar_approximation'? (known: ar_approximation, ",
        ),
    ],
)
def test_unknown_keys_of_its_tables_are_refused(table, key, hint, config):
    config[table][key] = None
    (fault,) = faults_of(config)
    assert fault.startswith(f"{table}.{key}: unknown, ")
    assert hint in fault


def test_other_keys_at_the_top_level_are_not(config):
    config |= {"dflasher": {"objective": "ce"}, "max_window_layers": 5, "auto_map": {"AutoModel": "a.B"}}
    assert faults_of(config) == []


PLACES = {
    "other architecture": (
        {"architectures": ["Qwen3DSparkModel"]},
        "architectures: expected DFlashDraftModel",
    ),
    "architecture no list": (
        {"architectures": "DFlashDraftModel"},
        "architectures: expected DFlashDraftModel",
    ),
    "own vocabulary": ({"draft_vocab_size": 64}, "draft_vocab_size: expected the vocab_size, 128, found 64"),
    "states of another size": (
        {"target_hidden_size": 32},
        "target_hidden_size: expected the hidden_size, 64, found 32",
    ),
    "layers twice": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2, 2]}},
        "dflash_config.target_layer_ids: expected each layer once, found [0, 1, 2, 2]",
    ),
    "other mask": (
        {"mask_token_id": 5},
        "mask_token_id: expected one value, found 5 and, in dflash_config, 1",
    ),
    "other layers": (
        {"target_layer_ids": [0, 1, 2]},
        "target_layer_ids: expected one value, found [0, 1, 2]",
    ),
    "layers not plus one": (
        {"aux_hidden_state_layer_ids": [0, 1, 2, 3]},
        "aux_hidden_state_layer_ids: expected the target_layer_ids plus one, [1, 2, 3, 4], found [0, ",
    ),
    "windows": (
        {"layer_types": None, "use_sliding_window": True, "sliding_window": 2048},
        "use_sliding_window: expected false, or layer_types of full_attention alone",
    ),
    "a window": (
        {"layer_types": None, "sliding_window": 2048},
        "sliding_window: expected null, or layer_types",
    ),
    "windows maybe": ({"use_sliding_window": "no"}, 'use_sliding_window: expected true or false, found "no"'),
    "too few kinds": (
        {"layer_types": ["full_attention"]},
        "layer_types: expected one for each of 2 layers, found 1",
    ),
    "uneven heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads: expected a divisor of the 4 attention heads, found 3",
    ),
    "no epsilon": ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number, found NaN"),
    "a block without end": ({"block_size": 10**9}, "block_size: expected at most 1024, found 1000000000"),
}


@pytest.mark.parametrize("case", PLACES)
def test_what_contradicts_itself_or_is_another_drafters_is_refused(case, config):
    changes, fault = PLACES[case]
    config |= changes
    (found,) = faults_of(config)
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": None, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
        {"layer_types": None, "use_sliding_window": False, "sliding_window": None},
        {"use_sliding_window": True, "sliding_window": 2048},  # layer_types decides
        {"mask_token_id": 1, "target_layer_ids": [0, 1, 2, 3], "aux_hidden_state_layer_ids": [1, 2, 3, 4]},
        {"draft_vocab_size": 128, "target_hidden_size": 64, "is_causal": False},
        {"architectures": ["DFlashDraftModel"]},
        {"architectures": None},
    ],
)
def test_what_says_the_same_is_read(changes, config):
    config |= changes
    assert faults_of(config) == []


def test_mask_and_layers_are_read_from_the_top_level_too(config):
    inner = config.pop("dflash_config")
    facts, faults = read_facts({**config, **inner}, TARGET)
    assert faults == []
    assert facts.mask_token_id == 1
    assert facts.target_layer_ids == (0, 1, 2, 3)


# As public files have them; sizes are those of the tables of their cards.
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 151936,
    "dtype": "bfloat16",
}
LAYERS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
PUBLIC = {
    "older DFlash": {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 16,
        "num_target_layers": 36,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * 5,
        "dflash_config": LAYERS,
    },
    "newer DFlash": {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "is_causal": False,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "layer_types": ["full_attention"] * 5,
        "dflash_config": {"block_size": 16, **LAYERS},
    },
    "older TreeFlash": {
        **SIZES,
        "architectures": ["TreeFlashDraftModel"],
        "ar_approximation": "swiglu",
        "candidate_tokens": 16,
        "block_size": 16,
        "num_target_layers": 36,
        "rope_theta": 1000000.0,
        "dflash_config": LAYERS,
    },
    "newer TreeFlash": {
        **SIZES,
        "architectures": ["TreeFlashDraftModel"],
        "num_target_layers": 36,
        "rope_theta": 1000000.0,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "block_size": 16,
        "dflash_config": LAYERS,
        "treeflash_config": {"ar_approximation": None, "candidate_tokens": 16},
    },
    "a converter's": {
        **SIZES,
        "architectures": ["DFlashDraftModel"],
        "model_type": "llama",
        "block_size": 16,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "dflash_config": {"block_size": 16, "projector_type": "dflash", "causal": False, **LAYERS},
    },
}


@pytest.mark.parametrize("name", PUBLIC)
def test_configs_as_public_files_have_them_are_read(name):
    facts, faults = read_facts(PUBLIC[name], TargetFacts(2560, 36, 151936, 1e6))
    assert faults == []
    assert (facts.block_size, facts.mask_token_id) == (16, 151669)
    assert facts.target_layer_ids == (1, 9, 17, 25, 33)
    assert facts.network["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


DFLASH_2 = {
    "by its architecture": ({"architectures": ["DFlash2DraftModel"]}, {}, {}),
    "by its settings": ({}, {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256}, {}),
    "by a selector": ({}, {}, {"candidate_selector.successor_codebook": (128, 8)}),
    "by a convolution": ({}, {}, {"layers.0.attention_conv.base_kernel": (2, 2, 64)}),
}


@pytest.mark.parametrize("component", [DFlash, SwiGlu])
@pytest.mark.parametrize("case", DFLASH_2)
def test_dflash_2_is_refused_in_one_sentence(case, component, checkpoint_files, tmp_path, tiny_target):
    top, inner, tensors = DFLASH_2[case]
    files = checkpoint_files.shipped()
    files.config |= top
    files.config["dflash_config"] |= inner
    files.tensors |= {name: torch.zeros(shape) for name, shape in tensors.items()}
    with pytest.raises(CheckpointError) as error:
        component.from_checkpoint(files.write(tmp_path), tiny_target)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}: expected a DFlash or TreeFlash drafter, found one of DFlash 2 (")
    assert message.endswith(", which is not supported yet")
    assert "\n" not in message


def test_more_layers_than_are_stored_are_refused_before_they_are_made(
    checkpoint_files, tmp_path, tiny_target
):
    files = checkpoint_files.shipped()
    files.config |= {"num_hidden_layers": 10**9, "layer_types": None}
    with pytest.raises(CheckpointError, match="expected the 2 whose tensors are stored, found 1000000000"):
        DFlash.from_checkpoint(files.write(tmp_path), tiny_target)
