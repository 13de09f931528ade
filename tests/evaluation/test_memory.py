"""The most memory in use: of what was watched alone, or unknown."""

import pytest
import torch

from treeflash.evaluation import memory
from treeflash.evaluation.memory import MemoryWatch


@pytest.fixture
def status(tmp_path, monkeypatch):
    path = tmp_path / "status"
    path.write_text("Name:\tpython\nVmHWM:\t      77 kB\nVmRSS:\t      50 kB\n")
    monkeypatch.setattr(memory, "_STATUS", path)
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "clear_refs")
    return path


def test_the_peak_is_of_what_was_watched(status, tmp_path):
    watch = MemoryWatch.begin(torch.device("cpu"))
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert watch.peak() == 77 * 1024


def test_a_peak_that_cannot_be_forgotten_is_none(status, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "nowhere" / "clear_refs")
    assert MemoryWatch.begin(torch.device("cpu")).peak() is None


def test_where_nothing_is_told_the_peak_is_none(status):
    watch = MemoryWatch.begin(torch.device("cpu"))
    status.write_text("Name:\tpython\n")
    assert watch.peak() is None
    status.unlink()
    assert watch.peak() is None
