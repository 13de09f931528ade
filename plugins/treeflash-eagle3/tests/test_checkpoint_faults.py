"""Checkpoints that are refused, in one message that lists everything."""

import re

import pytest
import torch
from treeflash_eagle3.drafter import Eagle3
from treeflash_eagle3.layout import read_facts

from treeflash.engine import Decoder
from treeflash.errors import CheckpointError
from treeflash.target import wrap_model
from treeflash.target_interface import TargetFacts
from treeflash.testing.families import tiny_model


@pytest.fixture
def refusal(files, tmp_path, tiny_target):
    """Writes the files and returns the faults they are refused with."""

    def refuse(target=tiny_target) -> list[str]:
        files.write(tmp_path)
        with pytest.raises(CheckpointError) as error:
            Eagle3.from_checkpoint(tmp_path, target)
        headline, *faults = str(error.value).splitlines()
        if not faults:
            place, _, fault = headline.partition(": ")
            assert place == str(tmp_path)
            return [fault]
        faults = [fault.removeprefix("  - ") for fault in faults]
        if (hidden := re.fullmatch(r"and (\d+) more like these", faults[-1])) is not None:
            assert headline == f"{tmp_path}: {len(faults) - 1 + int(hidden[1])} faults"
        else:
            assert headline == f"{tmp_path}: {len(faults)} faults"
        return faults

    return refuse


def test_every_tensor_fault_is_listed_at_once(files, refusal):
    del files.tensors["fc.weight"]
    del files.tensors["t2d"]
    files.tensors["embed_tokens.weight"] = torch.zeros(128, 64)
    files.tensors["lm_head.weight"] = torch.zeros(128, 64)
    files.tensors["midlayer.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    files.tensors["norm.weight"] = torch.zeros(64, dtype=torch.int64)
    files.tensors["d2t"] = files.tensors["d2t"].float()
    assert refusal() == [
        "backbone tensor d2t: expected I64, found F32",
        "backbone tensor embed_tokens.weight is unknown",
        "backbone tensor fc.weight is missing",
        "backbone tensor lm_head.weight: expected shape [96, 64], found [128, 64]",
        "backbone tensor midlayer.self_attn.q_proj.weight: expected shape [64, 128], found [64, 64]",
        "backbone tensor norm.weight: expected one of BF16, F16, F32, F64, found I64",
        "backbone tensor t2d is missing",
    ]


def test_config_and_tensor_faults_are_listed_together(files, refusal):
    files.config |= {"num_hidden_layers": 2, "hidden_act": "gelu"}
    del files.tensors["norm.weight"]
    assert refusal() == [
        "num_hidden_layers: expected 1, found 2",
        "hidden_act: expected 'silu', found 'gelu'",
        "backbone tensor norm.weight is missing",
    ]


def test_missing_keys_are_listed_at_once(files, refusal):
    del files.config["draft_vocab_size"]
    del files.config["hidden_size"]
    files.config["num_attention_heads"] = "4"
    assert refusal() == [
        "hidden_size: expected an integer >= 1, found nothing",
        "num_attention_heads: expected an integer >= 1, found '4'",
        "draft_vocab_size: expected an integer >= 1, found nothing",
    ]


OUTSIDE = "expected it inside eagle_config, found it outside, where some count inputs and some outputs"
CONFIG_FAULTS = {
    "other hidden size": (
        {"hidden_size": 32},
        "hidden_size: expected the target's 64, found 32",
    ),
    "other vocabulary": ({"vocab_size": 151936}, "vocab_size: expected the target's 128, found 151936"),
    "wide draft vocabulary": (
        {"draft_vocab_size": 200},
        "draft_vocab_size: expected at most the 128 tokens of vocab_size, found 200",
    ),
    "uneven heads": (
        {"num_key_value_heads": 3},
        "num_key_value_heads: expected a divisor of the 4 attention heads, found 3",
    ),
    "odd number": ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps: expected a positive number, found "1e-6"'),
    "odd scaling": ({"rope_scaling": 2.0}, "rope_scaling: expected an object, found 2.0"),
    "layers beyond": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
        "eagle_config.eagle_aux_hidden_state_layer_ids: expected 3 of the layers 0..2, found [0, 1, 3]",
    ),
    "layers not numbers": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}},
        'eagle_config.eagle_aux_hidden_state_layer_ids: expected a list of layer numbers, found "all"',
    ),
    "layers outside": (
        {"eagle_aux_hidden_state_layer_ids": [1, 1, 0]},
        f"eagle_aux_hidden_state_layer_ids: {OUTSIDE}",
    ),
    "table no object": ({"eagle_config": [1]}, "eagle_config: expected an object, found [1]"),
    "unknown key": (
        {"eagle_config": {"aux_layers": [0, 1, 2]}},
        "eagle_config.aux_layers: unknown, so it may say that this is another kind of drafter",
    ),
    "two bases": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5}},
        "rope_parameters.rope_theta: expected the 10000.0 of rope_theta, found 5",
    ),
    "two tables": (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
        'rope_scaling: expected what rope_parameters says, {"rope_type": "default"}, or no such key; found '
        '{"rope_type": "linear", "factor": 2.0}',
    ),
    "part of a head": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor: expected 1, found 0.5 (heads turned in part are not supported)",
    ),
    "a window": (
        {"sliding_window": 2048},
        "sliding_window: expected null, or layer_types of full_attention alone (windows are not supported), "
        "found 2048",
    ),
    "windows": (
        {"sliding_window": 2048, "use_sliding_window": True},
        "use_sliding_window: expected false, or layer_types of full_attention alone (windows are not "
        "supported), found true",
    ),
    "a layer with a window": (
        {"layer_types": ["sliding_attention"]},
        'layer_types: expected full_attention alone, found ["sliding_attention"]',
    ),
    "states of another size": (
        {"target_hidden_size": 32},
        "target_hidden_size: expected the hidden_size, 64, found 32",
    ),
}


@pytest.mark.parametrize(("change", "fault"), CONFIG_FAULTS.values(), ids=list(CONFIG_FAULTS))
def test_config_faults(files, refusal, change, fault):
    files.config |= change
    assert any(found.startswith(fault) for found in refusal())


OTHER_HEADS = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "norm_output": True,
    "use_aux_hidden_state": False,
    "num_aux_hidden_states": 4,
    "use_input_layernorm_in_first_layer": False,
    "use_last_layernorm": False,
    "use_mtp_layernorm": True,
    "parallel_drafting": True,
    "parallel_draft_step": 4,
    "attention_bias": True,
    "mlp_bias": True,
    "target_layer_ids": [1, 10, 19, 28, 37],
    "aux_hidden_state_layer_ids": [3, 31, 59],
}


@pytest.mark.parametrize("table", ["", "eagle_config"])
def test_settings_of_other_heads_are_refused_wherever_they_stand(table, files, tiny_target):
    known = tiny_target.fingerprint()
    place = files.config.setdefault(table, {}) if table else files.config
    for key, value in OTHER_HEADS.items():
        place[key] = value
        (fault,) = read_facts(files.config, known)[1]
        assert fault.startswith(f"{table}.{key}: expected " if table else f"{key}: expected ")
        place[key] = not value if isinstance(value, bool) else None
        assert read_facts(files.config, known)[1] == []


# As public heads say it; sizes are those of their cards.
PUBLIC = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "draft_vocab_size": 32000,
}
EXPORTED = {
    "eagle_aux_hidden_state_layer_ids": [1, 17, 32],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
}


@pytest.mark.parametrize("table", [None, {}, EXPORTED])
def test_configs_as_public_files_have_them_are_read(table):
    config = PUBLIC if table is None else {**PUBLIC, "eagle_config": table, "num_aux_hidden_states": 3}
    facts, faults = read_facts(config, TargetFacts(2560, 36, 151936, 1e6))
    assert faults == []
    assert facts.target_layer_ids == (1, 17, 32)
    assert facts.network["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}


def test_unknown_rotary_scaling_is_a_fault(files, refusal):
    files.config["rope_scaling"] = {"rope_type": "spiral"}
    (fault,) = refusal()
    assert fault.startswith("rope_parameters cannot be used: ")


@pytest.mark.parametrize("found", [128, -1])
def test_draft_tokens_outside_the_targets_vocabulary(files, refusal, found):
    files.tensors["d2t"][-1] = found - 95
    assert refusal() == [f"d2t: expected target ids in 0..127, found [{found}] among them"]


def test_two_draft_tokens_for_one_of_the_targets(files, refusal):
    files.tensors["d2t"][1] = -1
    assert refusal() == ["d2t: expected a target id for each draft token, found one that two of them share"]


def test_tables_that_contradict_each_other(files, refusal):
    files.tensors["t2d"][2:4] = files.tensors["t2d"][2:4].logical_not()
    assert refusal() == ["t2d: expected true at the target ids of d2t and nowhere else"]


def test_numbers_that_are_none(files, refusal):
    files.tensors["fc.weight"][0, 0] = torch.nan
    assert refusal() == ["backbone tensor fc.weight holds values that are not finite"]


def test_a_target_of_too_few_layers(files, refusal):
    model = tiny_model("qwen3", vocab_size=128, hidden_size=64, num_hidden_layers=3)
    assert refusal(wrap_model(model)) == ["the target: expected at least 4 layers, found 3"]


def test_pickled_weights_are_not_read(files, tmp_path, tiny_target):
    files.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin; .* are not read"):
        Eagle3.from_checkpoint(tmp_path, tiny_target)


def test_a_drafter_is_not_bound_to_another_target(golden, tiny_target):
    drafter = Eagle3.from_checkpoint(golden / "tiny-eagle3", tiny_target)
    other = wrap_model(tiny_model("qwen3", vocab_size=40, num_hidden_layers=4, dtype=torch.float64))
    with pytest.raises(CheckpointError) as error:
        Decoder(other, drafter)
    assert str(error.value).splitlines() == [
        "the drafter was made for another target: 3 faults",
        "  - hidden_size: expected the target's 32, found 64",
        "  - vocab_size: expected the target's 40, found 128",
        "  - weights: expected the target's torch.float64, found torch.float32",
    ]


def test_prefixed_names_load(files, tmp_path, tiny_target):
    files.tensors = {f"model.{name}": tensor for name, tensor in files.tensors.items()}
    drafter = Eagle3.from_checkpoint(files.write(tmp_path), tiny_target)
    assert torch.equal(drafter.network.fc.weight, files.tensors["model.fc.weight"])
    assert drafter.network.d2t.dtype == torch.int64
    assert drafter.network.t2d.dtype == torch.bool
