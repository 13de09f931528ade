"""Two processes learn what one would, with copies of the weights or with shared ones."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

SETTINGS = {
    "target": {"device": "cpu"},
    "drafter": {"block_size": 4, "layers": 1, "intermediate_size": 16, "anchors": 4},
    "data": {"states": "compute", "heldout_texts": 2, "length": 100},
    "train": {"steps": 4, "evaluate_every": 3, "save_every": 2, "average": 0.5},
}
# Four runs for the price of one start: the third goes on from the middle of the second, the last is refused.
SCRIPT = """
import os, shutil, sys, warnings
from pathlib import Path
import torch
from treeflash.cli import commands
from treeflash.errors import InputError

data, out, *settings = sys.argv[1:]
options = [word for setting in settings for word in ("-o", setting)]
torch.set_num_threads(1)

def train(name, *more):
    words = ["train", "tiny-train", "--data", data, "--out", f"{out}/{name}", *options, *more]
    commands(words, standalone_mode=False)

train("copies")
train("shared", "-o", "train.shard=true")
if os.environ["RANK"] == "0":
    shared = Path(out) / "shared"
    (shared / "drafter").rename(shared / "whole")
    shutil.rmtree(shared / "checkpoints" / "step-00000004")
torch.distributed.barrier()
train("shared", "-o", "train.shard=true")
try:
    train("shared", "-o", "train.shard=true", "-o", "optimizer.clip=2.0")
except InputError as error:
    print(f"process {os.environ['RANK']} ends: {str(error).splitlines()[0]}")
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def together(data, tmp_path_factory):
    """What two processes made, and what they said."""
    out = tmp_path_factory.mktemp("together")
    (out / "script.py").write_text(SCRIPT)
    settings = [f"{table}.{key}={value}" for table, keys in SETTINGS.items() for key, value in keys.items()]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    words += [str(out / "script.py"), str(data), str(out), "data.batch_size=4", *settings]
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done.stdout


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    """What one process makes of the same texts."""
    data = {**SETTINGS["data"], "batch_size": 8}
    return run(tmp_path_factory.mktemp("alone"), **{**SETTINGS, "data": data})


def steps(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def assert_close(one, other):
    mine, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert mine.keys() == theirs.keys()
    apart = {name: float((mine[name] - theirs[name]).abs().max()) for name in mine}
    assert max(apart.values()) < 1e-5, apart


@pytest.mark.parametrize(
    "way",
    [
        "copies",
        "shared",
    ],
)
def test_they_learn_what_one_would(together, alone, way):
    out, _ = together
    assert_close(out / way / "drafter", alone / "drafter")
    mine, theirs = steps(out / way), steps(alone)
    assert [line["step"] for line in mine] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in mine] == pytest.approx([line[key] for line in theirs], rel=1e-4)
    assert [line["positions"] for line in mine] == [line["positions"] for line in theirs]


def test_shared_weights_go_on_from_a_checkpoint(together):
    out, _ = together
    whole, resumed = (out / "shared" / name / "model.safetensors" for name in ("whole", "drafter"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_checkpoints_are_those_of_one_process(together, alone):
    out, _ = together
    for name in ("weights", "average", "optimizer"):
        files = [
            load_file(folder / "checkpoints" / "step-00000004" / f"{name}.safetensors")
            for folder in (out / "copies", out / "shared", alone)
        ]
        shapes = [{key: tuple(tensor.shape) for key, tensor in file.items()} for file in files]
        assert shapes[0] == shapes[1] == shapes[2]


def test_one_of_them_speaks(together):
    out, said = together
    lines = [line for line in said.splitlines() if "decode with it" in line]
    assert lines == [
        f"decode with it: treeflash generate {out}/{way}/drafter/recipe.toml ..."
        for way in ("copies", "shared", "shared")
    ]


def test_what_the_first_refuses_ends_all(together):
    out, said = together
    lines = sorted(line for line in said.splitlines() if " ends: " in line)
    begun = f"{out}/shared was begun with other settings (deleted, or in another place, it begins anew)"
    fault = f"{begun}: optimizer.clip: expected None as before, found 2.0"
    assert lines == [f"process {rank} ends: {fault}" for rank in (0, 1)]
