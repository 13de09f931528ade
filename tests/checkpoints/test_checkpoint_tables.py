"""Tables of ids and flags beside the weights: read and written in their own dtype."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from treeflash.checkpoints.reader import Checkpoint
from treeflash.checkpoints.writing import write_checkpoint


class Mapped(nn.Module):
    """A weight and two tables."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 3), 0.1))
        self.register_buffer("ids", torch.tensor([1, 300, 70_000]))
        self.register_buffer("flags", torch.tensor([True, False]))


@pytest.fixture
def empty():
    with torch.device("meta"):
        return Mapped()


def test_tables_keep_their_dtype(tmp_path, empty):
    write_checkpoint(tmp_path, {}, Mapped(), None, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "weight": torch.bfloat16,
        "ids": torch.int64,
        "flags": torch.bool,
    }
    assert Checkpoint.open(tmp_path).load(empty, "backbone") == []
    found = empty.state_dict()
    assert found.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())
    assert not empty.weight.requires_grad


def test_tables_of_another_dtype_are_faults(tmp_path, empty):
    tensors = {"weight": torch.zeros(2, 3), "ids": torch.zeros(3), "flags": torch.zeros(2, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert Checkpoint.open(tmp_path).load(empty, "backbone") == [
        "backbone tensor flags: expected BOOL, found I64",
        "backbone tensor ids: expected I64, found F32",
    ]
