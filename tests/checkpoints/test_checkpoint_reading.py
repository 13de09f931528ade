"""Checkpoints that are read: every layout the public files use."""

import pytest
import torch

from treeflash.checkpoints.dflash_layout import read_facts
from treeflash.checkpoints.reader import Checkpoint
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.target_interface import TargetFacts

TARGET = TargetFacts(hidden_size=64, num_layers=4, vocab_size=128, rope_theta=10000.0)


def facts_of(config, target=TARGET):
    facts, faults = read_facts(config, target)
    assert faults == []
    return facts


def assert_holds(module, expected):
    state = module.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name].cpu(), tensor), name


def backbone(files):
    return {name: tensor for name, tensor in files.tensors.items() if not name.startswith("ar_")}


@pytest.mark.parametrize("name", ["tiny-dflash", "tiny-treeflash"])
def test_shipped_backbones_load(name, models, tiny_target, checkpoint_files):
    drafter = DFlash.from_checkpoint(models / name, tiny_target)
    assert_holds(drafter.network, backbone(checkpoint_files.shipped(name)))
    assert drafter.max_depth == 7
    assert drafter.tap_layers == (0, 1, 2, 3)


def test_shipped_refiner_loads(models, tiny_target, checkpoint_files):
    refiner = SwiGlu.from_checkpoint(models / "tiny-treeflash", tiny_target)
    files = checkpoint_files.shipped()
    section = {
        name.removeprefix("ar_approximation."): tensor
        for name, tensor in files.tensors.items()
        if name.startswith("ar_")
    }
    assert_holds(refiner.network, section)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_prefix_and_shards_change_nothing(prefix, layout, tmp_path, tiny_target, checkpoint_files):
    files = checkpoint_files.shipped()
    named = files.prefixed(prefix)
    folder = named.write(tmp_path) if layout == "single" else named.write_shards(tmp_path)
    assert_holds(DFlash.from_checkpoint(folder, tiny_target).network, backbone(files))
    refiner = SwiGlu.from_checkpoint(folder, tiny_target)
    assert torch.equal(refiner.network.d.weight.cpu(), files.tensors["ar_approximation.d.weight"])


def test_index_wins_over_a_file_beside_it(tmp_path, tiny_target, checkpoint_files):
    # What is in the shards is the checkpoint; a stray single file is not mixed in.
    files = checkpoint_files.shipped()
    files.write_shards(tmp_path)
    stray = checkpoint_files(files.config, {"stray.weight": torch.ones(1)})
    stray.write(tmp_path)
    assert_holds(DFlash.from_checkpoint(tmp_path, tiny_target).network, backbone(files))


def test_prefixes_may_be_mixed(tmp_path, tiny_target, checkpoint_files):
    files = checkpoint_files.shipped()
    mixed = {
        ("" if name.startswith("ar_") else "model.") + name: tensor for name, tensor in files.tensors.items()
    }
    folder = checkpoint_files(files.config, mixed).write(tmp_path)
    assert_holds(DFlash.from_checkpoint(folder, tiny_target).network, backbone(files))
    SwiGlu.from_checkpoint(folder, tiny_target)


def test_sections_are_told_apart(tmp_path, checkpoint_files):
    # Both sections have a norm.weight; neither may take the other's.
    checkpoint = Checkpoint.open(checkpoint_files.shipped().prefixed().write(tmp_path))
    assert checkpoint.backbone["norm.weight"].key == "model.norm.weight"
    assert checkpoint.refiner["norm.weight"].key == "model.ar_approximation.norm.weight"
    assert set(checkpoint.refiner) == {"norm.weight", "ug.weight", "ug.bias", "d.weight"}


def test_backbone_ignores_a_broken_refiner(tmp_path, tiny_target, checkpoint_files):
    files = checkpoint_files.shipped()
    files.tensors["ar_approximation.d.weight"] = torch.full((2, 2), torch.nan)
    files.tensors["ar_approximation.stray"] = torch.ones(1)
    assert_holds(DFlash.from_checkpoint(files.write(tmp_path), tiny_target).network, backbone(files))


def test_weights_take_the_targets_dtype_and_device(tmp_path, tiny_target, checkpoint_files):
    files = checkpoint_files.shipped()
    files.tensors = {name: tensor.to(torch.bfloat16) for name, tensor in files.tensors.items()}
    drafter = DFlash.from_checkpoint(files.write(tmp_path), tiny_target)
    weights = list(drafter.network.parameters())
    assert {weight.dtype for weight in weights} == {tiny_target.dtype}
    assert {weight.device for weight in weights} == {tiny_target.device}
    assert not any(weight.requires_grad for weight in weights)


def test_block_size_stands_in_either_place(checkpoint_files):
    config = checkpoint_files.shipped("tiny-dflash").config
    assert facts_of(config).block_size == 8
    inner = {**config["dflash_config"], "block_size": config["block_size"]}
    both = {**config, "dflash_config": inner}
    assert facts_of(both).block_size == 8
    newer = {key: value for key, value in both.items() if key != "block_size"}
    assert facts_of(newer).block_size == 8


def test_refiner_is_named_in_either_place(checkpoint_files):
    config = checkpoint_files.shipped().config
    assert facts_of(config).refiner == "swiglu"
    del config["treeflash_config"]
    assert facts_of(config).refiner is None
    assert facts_of({**config, "ar_approximation": "swiglu", "candidate_tokens": 16}).refiner == "swiglu"


def test_nested_null_means_no_refiner(checkpoint_files):
    # The newer place decides, also when it says that there is none.
    config = checkpoint_files.shipped().config
    nested = {**config["treeflash_config"], "ar_approximation": None}
    config |= {"treeflash_config": nested, "ar_approximation": "swiglu"}
    assert facts_of(config).refiner is None


@pytest.mark.parametrize("key", ["num_target_layers", "vocab_size", "layer_types", "rope_parameters"])
def test_keys_that_files_leave_out_may_be_missing(key, checkpoint_files):
    config = checkpoint_files.shipped().config
    del config[key]
    assert facts_of(config).block_size == 8


@pytest.mark.parametrize("sizes", [(151936, 152064), (152064, 151936), (128, 128), (49152, 49280)])
def test_padded_vocabularies_are_one(sizes, checkpoint_files):
    drafter, target = sizes
    config = {**checkpoint_files.shipped().config, "vocab_size": drafter}
    facts = facts_of(config, TargetFacts(64, 4, target, 10000.0))
    assert facts.misfits(TargetFacts(64, 4, target, 10000.0)) == []


@pytest.mark.parametrize("sizes", [(96, 128), (128, 96), (32000, 128256), (151936, 49152)])
def test_other_vocabularies_are_refused(sizes, checkpoint_files):
    drafter, target = sizes
    config = {**checkpoint_files.shipped().config, "vocab_size": drafter}
    _, faults = read_facts(config, TargetFacts(64, 4, target, 10000.0))
    assert faults == [f"vocab_size: expected the target's {target}, found {drafter}"]


def test_facts_name_each_misfit_with_another_target(checkpoint_files):
    facts = facts_of(checkpoint_files.shipped().config)
    assert facts.misfits(TARGET) == []
    faults = facts.misfits(TargetFacts(hidden_size=32, num_layers=3, vocab_size=1000, rope_theta=1e6))
    assert [fault.split(":")[0] for fault in faults] == [
        "hidden_size",
        "num_target_layers",
        "rope_theta",
        "vocab_size",
        "target_layer_ids",
    ]
