"""The benchmark for a GPU, at a small shape: the code is the same, and no time is looked at."""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ARMS = {"plain", "dflash-15", "ddtree-7", "treeflash-7", "ddtree-31", "treeflash-31"}
STAGES = {"draft", "build", "refine", "select", "verify", "commit", "other"}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return runpy.run_path(str(BENCHMARKS / "gpu.py"))["main"]


def test_every_arm_accepts_what_it_is_told(benchmark, tmp_path, capsys):
    out = tmp_path / "gpu.json"
    sizes = ["--budgets", "7,31", "--tokens", "40", "--prompt-tokens", "20", "--rounds", "1"]
    benchmark(["--models", "tiny", "--device", "cpu", *sizes, "--out", str(out)])
    found = json.loads(out.read_text())["models"]["tiny"]
    assert found["options"] == "lean, sdpa"
    assert set(found["arms"]) == ARMS
    for name, arm in found["arms"].items():
        # Two runs, each as told to one token; the steps of both are counted together.
        assert arm["tau"] == pytest.approx(arm["asked"], abs=2 / arm["steps"]), name
        assert arm["tau"] == 1 or arm["tau"] > 6, name
        assert set(arm["stages"]) == STAGES
        assert 0 < arm["pass"] <= arm["stages"]["verify"], name
        plain = found["arms"]["plain"]["step"]
        assert arm["efficiency"] == pytest.approx(arm["speedup"] * arm["pass"] / (arm["tau"] * plain)), name
        for figure in ("efficiency", "speedup", "tokens_per_second", "of_limit"):
            assert math.isfinite(arm[figure]), (name, figure)
            assert arm[figure] > 0, (name, figure)
    assert "treeflash-31" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu(benchmark, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark([])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
