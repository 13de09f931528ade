"""Checkpoints that are refused, in one message that lists everything."""

import json

import pytest
import torch

from treeflash.checkpoints.dflash_layout import read_facts
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.engine import Decoder
from treeflash.errors import CheckpointError
from treeflash.target_interface import TargetFacts


@pytest.fixture
def files(checkpoint_files):
    return checkpoint_files.shipped()


@pytest.fixture
def refusal(tmp_path, tiny_target):
    """Writes a checkpoint and returns the one message it is refused with."""

    def refuse(files=None, component=DFlash) -> str:
        if files is not None:
            files.write(tmp_path)
        with pytest.raises(CheckpointError) as error:
            component.from_checkpoint(tmp_path, tiny_target)
        message = str(error.value)
        assert str(tmp_path) in message
        return message

    return refuse


def lines(message: str) -> list[str]:
    """The faults of a message, its headline and bullets taken off."""
    return [line.removeprefix("  - ") for line in message.splitlines()[1:]]


def test_every_tensor_fault_is_listed_at_once(files, refusal):
    del files.tensors["fc.weight"]
    del files.tensors["layers.1.mlp.up_proj.weight"]
    files.tensors["embed_tokens.weight"] = torch.zeros(128, 64)
    files.tensors["layers.2.input_layernorm.weight"] = torch.zeros(64)
    files.tensors["norm.weight"] = torch.zeros(63)
    files.tensors["layers.0.self_attn.q_proj.weight"] = torch.zeros(64, 32)
    message = refusal(files)
    assert "6 faults" in message.splitlines()[0]
    assert sorted(lines(message)) == sorted(
        [
            "backbone tensor fc.weight is missing",
            "backbone tensor layers.1.mlp.up_proj.weight is missing",
            "backbone tensor embed_tokens.weight is unknown",
            "backbone tensor layers.2.input_layernorm.weight is unknown",
            "backbone tensor norm.weight: expected shape [64], found [63]",
            "backbone tensor layers.0.self_attn.q_proj.weight: expected shape [64, 64], found [64, 32]",
        ]
    )


def test_config_and_tensor_faults_are_listed_together(files, refusal):
    files.config |= {"num_target_layers": 36, "vocab_size": 96}
    del files.tensors["fc.weight"]
    message = refusal(files)
    assert len(lines(message)) == 3
    for part in ("num_target_layers", "vocab_size", "fc.weight is missing"):
        assert part in message


def test_every_config_fault_is_listed_at_once(files, refusal):
    del files.config["dflash_config"]["target_layer_ids"]
    files.config |= {
        "vocab_size": 96,
        "layer_types": ["full_attention", "sliding_attention"],
        "num_hidden_layers": "2",
        "hidden_act": "gelu",
    }
    message = refusal(files)
    assert len(lines(message)) == 5
    for key in ("target_layer_ids", "vocab_size", "layer_types", "num_hidden_layers", "hidden_act"):
        assert key in message


def test_refiner_tensor_faults_are_listed_at_once(files, refusal):
    del files.tensors["ar_approximation.norm.weight"]
    files.tensors["ar_approximation.d.bias"] = torch.zeros(64)
    files.tensors["ar_approximation.ug.bias"] = torch.zeros(192)
    message = refusal(files, SwiGlu)
    assert len(lines(message)) == 3
    assert "norm.weight is missing" in message
    assert "ar_approximation.d.bias is unknown" in message
    assert "ar_approximation.ug.bias: expected shape [384], found [192]" in message


def test_faults_name_tensors_as_the_file_does(files, refusal):
    files.tensors["norm.weight"] = torch.zeros(63)
    assert "tensor model.norm.weight: expected" in refusal(files.prefixed())


def test_missing_refiner_tensor_has_its_whole_name(files, refusal):
    del files.tensors["ar_approximation.d.weight"]
    assert "ar_approximation.d.weight is missing" in refusal(files, SwiGlu)


CONFIG_FAULTS = {
    "layers missing": ({"dflash_config": {"mask_token_id": 1}}, ["target_layer_ids", "found nothing"]),
    "layers empty": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, ["target_layer_ids"]),
    "layers not numbers": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, "1", 2, 3]}},
        ["target_layer_ids", 'found [0, "1", 2, 3]'],
    ),
    "layers beyond": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2, 4]}},
        ["target_layer_ids", "layers 0..3", "found [4]"],
    ),
    "layers negative": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1, 1, 2, 3]}},
        ["target_layer_ids", "layers 0..3", "found [-1]"],
    ),
    "mask missing": ({"dflash_config": {"target_layer_ids": [0, 1, 2, 3]}}, ["mask_token_id", "nothing"]),
    "mask beyond": (
        {"dflash_config": {"mask_token_id": 128, "target_layer_ids": [0, 1, 2, 3]}},
        ["mask_token_id", "below 128", "found 128"],
    ),
    "no dflash_config": ({"dflash_config": {}}, ["mask_token_id", "target_layer_ids"]),
    "dflash_config no object": ({"dflash_config": [1]}, ["dflash_config: expected an object, found [1]"]),
    "block contradicts": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1, 2, 3], "block_size": 16}},
        ["block_size", "8", "16"],
    ),
    "block too small": ({"block_size": 1}, ["block_size", ">= 2", "found 1"]),
    "block no integer": ({"block_size": "8"}, ["block_size", 'found "8"']),
    "target layers": ({"num_target_layers": 36}, ["num_target_layers", "target's 4", "found 36"]),
    "vocabulary": ({"vocab_size": 96}, ["vocab_size", "target's 128", "found 96"]),
    "rotary base": (
        {"rope_theta": 1e6, "rope_parameters": None},
        ["rope_theta: expected the target's 10000.0, found 1000000.0"],
    ),
    "sliding": (
        {"layer_types": ["sliding_attention", "full_attention"]},
        ["layer_types", "full_attention", "sliding_attention"],
    ),
    "size missing": ({"intermediate_size": None}, ["intermediate_size", "found nothing"]),
    "size zero": ({"num_attention_heads": 0}, ["num_attention_heads", ">= 1", "found 0"]),
    "size a boolean": ({"num_hidden_layers": True}, ["num_hidden_layers", "found true"]),
    "refiner no name": ({"treeflash_config": {"ar_approximation": 3}}, ["ar_approximation", "found 3"]),
}


@pytest.mark.parametrize("case", CONFIG_FAULTS)
def test_config_faults_say_key_expected_found(case, files, refusal):
    changes, parts = CONFIG_FAULTS[case]
    files.config |= changes
    message = refusal(files)
    for part in parts:
        assert part in message


def test_rotary_base_is_read_from_either_place(files, refusal):
    del files.config["rope_theta"]
    files.config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    assert "rope_theta: expected the target's 10000.0, found 1000000.0" in refusal(files)


def test_hidden_size_is_the_targets(files, refusal):
    files.config["hidden_size"] = 32
    message = refusal(files)
    assert "hidden_size: expected the target's 64, found 32" in message
    # The tensors are compared with the config all the same.
    assert "fc.weight: expected shape [32, 128], found [64, 256]" in message


def test_a_tensor_stored_with_and_without_prefix_is_refused(files, refusal):
    files.tensors["model.fc.weight"] = files.tensors["fc.weight"].clone()
    assert "fc.weight is stored twice" in refusal(files)


def test_every_tensor_stored_twice_is_listed(files, refusal):
    for name in ("fc.weight", "norm.weight"):
        files.tensors[f"model.{name}"] = files.tensors[name].clone()
    message = refusal(files)
    assert "fc.weight is stored twice" in message
    assert "norm.weight is stored twice" in message


def test_a_tensor_in_two_shards_is_refused(files, tmp_path, tiny_target):
    files.write_shards(tmp_path, 2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["fc.weight"]
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(shard.read_bytes())
    index["weight_map"]["spare"] = copy.name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="stored twice"):
        DFlash.from_checkpoint(tmp_path, tiny_target)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused(value, files, refusal):
    files.tensors["fc.weight"][3, 5] = value
    files.tensors["norm.weight"][7] = value
    message = refusal(files)
    assert sorted(lines(message)) == [
        "backbone tensor fc.weight holds values that are not finite",
        "backbone tensor norm.weight holds values that are not finite",
    ]


def test_refiner_values_that_are_not_finite_are_refused(files, refusal):
    files.tensors["ar_approximation.d.weight"][0, 0] = torch.nan
    assert "ar_approximation.d.weight holds values that are not finite" in refusal(files, SwiGlu)


def test_a_pickle_is_not_read(files, tmp_path, refusal):
    files.write_config(tmp_path)
    # Not even opened: this one is no pickle at all.
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    message = refusal()
    for part in ("expected model.safetensors", "pytorch_model.bin", "write them again"):
        assert part in message


def test_a_folder_without_weights_is_refused(files, tmp_path, refusal):
    files.write_config(tmp_path)
    assert "expected model.safetensors" in refusal()


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_truncated_weights_are_refused(keep, files, tmp_path, refusal):
    files.write(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "not a readable safetensors file" in refusal()


def test_every_missing_shard_is_named(files, tmp_path, refusal):
    files.write_shards(tmp_path, 3)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1:]
    for shard in gone:
        shard.unlink()
    message = refusal()
    assert all(shard.name in message for shard in gone)


BROKEN_INDEXES = ["{}", '{"weight_map": 3}', '{"weight_map": {}}', "[]", "{"]
OUTSIDE = ["../model.safetensors", "/etc/passwd", "..", "", 3, None, "a\0.safetensors", "a" * 300]


@pytest.mark.parametrize(
    "index", [*BROKEN_INDEXES, *(json.dumps({"weight_map": {"fc.weight": name}}) for name in OUTSIDE)]
)
def test_a_broken_index_is_refused(index, files, tmp_path, refusal):
    files.write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read"),
        (b"{'a': 1}", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "line 1 is not UTF-8"),
        (b"[1]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(content, reason, files, tmp_path, refusal):
    files.write(tmp_path)
    config = tmp_path / "config.json"
    if content is None:
        config.unlink()
    else:
        config.write_bytes(content)
    message = refusal()
    assert str(config) in message
    assert reason in message


def test_no_folder_is_refused(tmp_path, tiny_target):
    with pytest.raises(CheckpointError, match=r"nowhere: expected a checkpoint folder, found none"):
        DFlash.from_checkpoint(tmp_path / "nowhere", tiny_target)


def test_errors_are_also_value_errors(tmp_path, tiny_target):
    with pytest.raises(ValueError, match=r"config\.json"):
        DFlash.from_checkpoint(tmp_path, tiny_target)


def test_a_drafter_of_another_target_is_refused_when_composed(models, tiny_target):
    drafter = DFlash.from_checkpoint(models / "tiny-treeflash", tiny_target)

    class Other:
        def __getattr__(self, name):
            return getattr(tiny_target, name)

        def fingerprint(self):
            return TargetFacts(hidden_size=64, num_layers=36, vocab_size=128, rope_theta=1e6)

    with pytest.raises(CheckpointError) as error:
        drafter.bind(Other())
    assert "num_target_layers: expected the target's 36, found 4" in str(error.value)
    assert "rope_theta" in str(error.value)


def test_a_refused_checkpoint_leaves_the_target_usable(files, refusal, tiny_target):
    prompt = [72, 105]
    before = Decoder(tiny_target).generate(prompt, max_new_tokens=4).token_ids
    files.config["hidden_size"] = 32
    refusal(files)
    assert Decoder(tiny_target).generate(prompt, max_new_tokens=4).token_ids == before


MALFORMED = {
    "layer_types a string": {"layer_types": "full_attention_everywhere"},
    "layer_types a number": {"layer_types": 5},
    "layer_types nested": {"layer_types": [["full_attention"]]},
    "rope_theta a string": {"rope_theta": "ten thousand"},
    "rope_theta a list": {"rope_theta": [10000.0]},
    "rope_parameters a list": {"rope_parameters": [1]},
    "rope_parameters short of keys": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
    "vocab_size a string": {"vocab_size": "96"},
    "vocab_size a fraction": {"vocab_size": 96.0},
    "head_dim a string": {"head_dim": "16"},
    "rms_norm_eps a string": {"rms_norm_eps": "tiny"},
    "attention_bias a string": {"attention_bias": "no"},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_values_of_the_wrong_kind_are_faults(case, files, refusal):
    files.config |= MALFORMED[case]
    assert next(iter(MALFORMED[case])) in refusal(files)


def test_no_rotary_base_is_a_fault_when_the_targets_is_not_the_default(files):
    for key in ("rope_theta", "rope_parameters"):
        del files.config[key]
    _, faults = read_facts(files.config, TargetFacts(64, 4, 128, 1e6))
    assert any("rope_theta" in fault for fault in faults)


def test_a_null_rotary_base_does_not_hide_the_nested_one(files, refusal):
    files.config |= {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert "rope_theta" in refusal(files)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_weights_of_a_dtype_that_cannot_be_used_are_faults(dtype, files, refusal):
    files.tensors["norm.weight"] = files.tensors["norm.weight"].to(dtype)
    assert "norm.weight" in refusal(files)
