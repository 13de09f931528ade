"""Fixtures shared by all tests: every device present, the tiny target, the reference outputs."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import treeflash.testing
from treeflash.cli import main
from treeflash.target import HuggingFaceTarget, load_target

# Tiny models gain nothing from threads, and lose much when other processes run.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start
settings.register_profile("suite", deadline=None, max_examples=25, print_blob=True)
settings.load_profile("suite")

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
MODELS = Path(treeflash.testing.__file__).parent / "models"


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=40, metavar="N", help="cases that each fuzzer tries")


@pytest.fixture
def fuzz_cases(request) -> int:
    """Cases that a fuzzer tries; their seeds are 0 to this."""
    return request.config.getoption("--fuzz")


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.fixture
def command(monkeypatch, capfd):
    """Runs a command line as a user does; gives its exit status and both outputs."""

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["treeflash", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return stop.value.code, out, err

    return command


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of the tiny target and drafters."""
    return MODELS


@pytest.fixture(scope="session")
def tiny_targets() -> dict[str, HuggingFaceTarget]:
    return {device: load_target(MODELS / "tiny-target", dtype="float32", device=device) for device in DEVICES}


@pytest.fixture
def tiny_target(tiny_targets, device) -> HuggingFaceTarget:
    """The tiny target in float32, on each device in turn."""
    return tiny_targets[device]
