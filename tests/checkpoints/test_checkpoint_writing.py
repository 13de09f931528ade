"""Checkpoints that are read and written again: equal tensor for tensor and key for key."""

import errno
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from treeflash.checkpoints.dflash_layout import read_facts
from treeflash.checkpoints.reader import Checkpoint
from treeflash.checkpoints.writing import write_checkpoint
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.components.refiners.bilinear import Bilinear
from treeflash.components.refiners.linear import Linear
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.trainables.dflash import DFlashTrainable, DFlashTrainingOptions
from treeflash.errors import CheckpointError
from treeflash.target import load_target
from treeflash.trainable import TrainContext

REFINERS = {"swiglu": SwiGlu, "two-token": TwoToken, "linear": Linear, "bilinear": Bilinear}
LAYOUTS = ["none", *REFINERS]
# Options of a refiner that is to be trained; the tables of this one have the rank of the stored ones.
TAUGHT = {"bilinear": {"rank": 8}}


@pytest.fixture
def stored(checkpoint_files, random_refiner):
    """What a checkpoint of a layout holds."""

    def stored(layout):
        if layout == "none":
            return checkpoint_files.shipped("tiny-dflash")
        if layout == "swiglu":
            return checkpoint_files.shipped("tiny-treeflash")
        return checkpoint_files.with_refiner(layout, random_refiner(layout))

    return stored


@pytest.fixture
def again(tmp_path):
    """Reads a checkpoint, as training does that starts from one, and writes it."""

    def again(folder, target, layout="none", out="again"):
        kind = REFINERS.get(layout)
        context = TrainContext(
            target=target,
            locate=Path,
            loss=ForwardKl(),
            columns=None,
            frequent=torch.arange,
            refiner=kind,
            refiner_options=kind and kind.TrainingOptions(**TAUGHT.get(layout, {})),
            dtype=torch.float32,
            generator=torch.Generator().manual_seed(0),
        )
        trainable = DFlashTrainable.from_options(DFlashTrainingOptions(checkpoint=str(folder)), context)
        (tmp_path / out).mkdir()
        trainable.write(tmp_path / out)
        return tmp_path / out

    return again


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def assert_same_tensors(folder, expected):
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("form", ["single", "prefixed", "sharded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_written_as_it_was_read(layout, form, stored, again, tmp_path, tiny_target):
    files = stored(layout)
    named = files if form == "single" else files.prefixed()
    folder = named.write_shards(tmp_path / "first") if form == "sharded" else named.write(tmp_path / "first")
    written = again(folder, tiny_target, layout)
    assert_same_tensors(written, files.tensors)
    config = config_of(written)
    assert config == files.config
    before, after = (read_facts(part, tiny_target.fingerprint()) for part in (files.config, config))
    assert (before, after[1]) == (after, [])
    assert after[0].refiner == (None if layout == "none" else layout)
    assert {file.name for file in written.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_written_is_read_by_what_decodes(layout, stored, again, tmp_path, tiny_target):
    files = stored(layout)
    written = again(files.write(tmp_path / "first"), tiny_target, layout)
    state = dict(DFlash.from_checkpoint(written, tiny_target).network.state_dict())
    if layout != "none":
        refiner = REFINERS[layout].from_checkpoint(written, tiny_target).network.state_dict()
        state |= {f"ar_approximation.{name}": weight for name, weight in refiner.items()}
    assert state.keys() == files.tensors.keys()
    assert all(torch.equal(state[name].cpu(), tensor) for name, tensor in files.tensors.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_twice_it_is_the_same_bytes(layout, stored, again, tmp_path, tiny_target):
    once = again(stored(layout).write(tmp_path / "first"), tiny_target, layout, "once")
    twice = again(once, tiny_target, layout, "twice")
    for file in ("config.json", "model.safetensors"):
        assert (once / file).read_bytes() == (twice / file).read_bytes()


UNUSUAL = {
    "norm": {"rms_norm_eps": 1e-5},
    "positions": {"max_position_embeddings": 512},
    "rope scaling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "whole-number RoPE base": {"rope_theta": 10000},
    "rope scaling in the older place": {
        "rope_parameters": None,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "block size in the newer place": {
        "block_size": None,
        "dflash_config": {"mask_token_id": 7, "target_layer_ids": [3, 1, 0, 2], "block_size": 8},
    },
    "another block": {"block_size": 5},
    "refiner named in the older place": {"treeflash_config": None, "ar_approximation": "swiglu"},
    "target that is not described": {"num_target_layers": None, "vocab_size": None, "layer_types": None},
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_values_are_kept(case, stored, again, tmp_path, tiny_target):
    files = stored("swiglu")
    changes = UNUSUAL[case]
    files.config |= changes
    files.config = {key: value for key, value in files.config.items() if value is not None}
    written = again(files.write(tmp_path / "first"), tiny_target, "swiglu")
    before, after = (
        read_facts(part, tiny_target.fingerprint()) for part in (files.config, config_of(written))
    )
    assert before == after
    assert before[1] == []
    config = config_of(written)
    assert {key: config[key] for key in files.config} == files.config


def test_attention_biases_are_kept(stored, again, tmp_path, tiny_target):
    files = stored("none")
    files.config["attention_bias"] = True
    generator = torch.Generator().manual_seed(1)
    weights = {name: tensor for name, tensor in files.tensors.items() if "_proj.weight" in name}
    for name, weight in weights.items():
        if "self_attn" in name:
            bias = torch.randn(weight.shape[0], generator=generator)
            files.tensors[name.replace(".weight", ".bias")] = bias
    written = again(files.write(tmp_path / "first"), tiny_target)
    assert_same_tensors(written, files.tensors)
    assert config_of(written)["attention_bias"] is True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_stays_bfloat16(layout, stored, again, tmp_path, models, device):
    files = stored(layout)
    files.tensors = {name: tensor.to(torch.bfloat16) for name, tensor in files.tensors.items()}
    target = load_target(models / "tiny-target", dtype="bfloat16", device=device)
    written = again(files.write(tmp_path / "first"), target, layout)
    assert_same_tensors(written, files.tensors)
    assert config_of(written)["dtype"] == "bfloat16"


def test_the_refiner_in_the_file_is_left_out_with_a_recipe_of_none(stored, again, tmp_path, tiny_target):
    files = stored("swiglu")
    written = again(files.write(tmp_path / "first"), tiny_target, "none")
    names = {name for name in files.tensors if not name.startswith("ar_approximation.")}
    assert_same_tensors(written, {name: files.tensors[name] for name in names})
    # Whoever asks for a refiner is told that there is none, not that its weights are missing.
    with pytest.raises(CheckpointError, match="expected 'swiglu', found no refiner"):
        SwiGlu.from_checkpoint(written, tiny_target)


@pytest.fixture
def write(stored, tmp_path, tiny_target):
    """Writes a backbone into a folder."""
    source = stored("none").write(tmp_path / "first")
    network, config = DFlash.from_checkpoint(source, tiny_target).network, Checkpoint.open(source).config
    folder = tmp_path / "written"
    folder.mkdir()
    return lambda: write_checkpoint(folder, config, network, None, torch.float32)


@pytest.fixture
def full():
    """Fills the disk: weights no longer find room, or a text; None makes room again."""
    limit, patch = resource.getrlimit(resource.RLIMIT_FSIZE), pytest.MonkeyPatch()

    def refuse(path, *arguments, **options):
        path.write_bytes(b"{")
        raise OSError(errno.ENOSPC, "No space left on device")

    def full(what):
        patch.undo()
        size = 100_000 if what == "weights" else limit[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
        if what == "config":
            patch.setattr(Path, "write_text", refuse)

    yield full
    full(None)


@pytest.mark.parametrize("what", ["weights", "config"])
def test_a_full_disk_is_one_clear_error_and_leaves_nothing_half_written(what, write, full, stored, tmp_path):
    folder = tmp_path / "written"
    full(what)
    with pytest.raises(CheckpointError) as error:
        write()
    message = str(error.value)
    assert message.startswith(f"{folder}")
    assert "cannot be written" in message
    assert ("File too large" if what == "weights" else "No space left on device") in message
    assert "\n" not in message
    assert list(folder.iterdir()) == []
    full(None)
    write()
    assert_same_tensors(folder, stored("none").tensors)


def test_a_folder_that_is_not_there_is_one_clear_error(write, tmp_path):
    (tmp_path / "written").rmdir()
    with pytest.raises(CheckpointError, match=r"written: cannot be written \(.*No such file or directory"):
        write()
