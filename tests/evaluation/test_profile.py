"""A step's stages, and the share of it that the target's own pass is."""

import json

import attrs
import pytest

from treeflash.evaluation.arms import ArmText, open_arms
from treeflash.evaluation.profile import profiles, work_of, write_profiles
from treeflash.evaluation.summary import summarise
from treeflash.evaluation.work import Work
from treeflash.plugins import Registry

from .test_counting import PromptRuns, run


def rows():
    """Plain steps of 1 s; steps of 2 s with a pass of 1.4 s in them, 3 tokens each."""
    plain = attrs.evolve(run("plain", [1] * 6, 6.0), seconds={"verify": 5.7}, pass_seconds=5.4)
    mine = attrs.evolve(run("mine", [3, 3], 4.0), seconds={"draft": 0.8, "verify": 3.0}, pass_seconds=2.8)
    return summarise([PromptRuns("set", 0, "a", [plain, mine])])["set"]


def test_efficiency_is_the_speedup_over_that_of_free_drafts():
    plain, mine = profiles(rows(), {"plain": {}, "mine": {"draft": Work(5, 6, 7)}})
    assert mine.seconds == pytest.approx(2.0)
    # 1.5 times plain; were all but the pass free, 3 tokens would take 1.4 s.
    assert mine.pass_seconds == pytest.approx(1.4)
    assert mine.efficiency == pytest.approx(1.5 / (3 / 1.4))
    assert plain.efficiency == pytest.approx(0.9)
    assert [stage.name for stage in mine.stages] == ["draft", "verify", "rest"]
    assert [stage.seconds for stage in mine.stages] == pytest.approx([0.4, 1.5, 0.1])
    assert [stage.work for stage in mine.stages] == [Work(5, 6, 7), Work(), Work()]


def test_without_times_of_passes_there_is_none():
    bare = [attrs.evolve(row, pass_seconds=None) for row in rows()]
    assert profiles(bare, {"plain": {}, "mine": {}}) == []


def test_trees_that_go_by_the_clock_are_counted_at_the_size_they_had(monkeypatch, tmp_path):
    """In each prompt set; and drafts that were mostly left out were drafts all the same."""
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    text = ArmText.parse("mine=tiny-treeflash,selector.use=cost-aware,selector.most=20")
    target, arms = open_arms([text], Registry.load(), {"target": {"device": "cpu"}})
    prompt, done = target.require_text().encode_chat("Ana has 7 apples."), []
    plain, mine = rows()
    for nodes in ([], [0.2], [1.0, 6.9], [1.0, 14.2]):
        summaries = [attrs.evolve(plain, nodes=[]), attrs.evolve(mine, nodes=nodes)]
        done.append(work_of(arms, summaries, prompt, 6)["mine"])
    alone, *drafted = (work["verify"].flops for work in done)
    assert alone < drafted[0] < drafted[1] < drafted[2]
    assert done[1]["draft"].flops > 0


def test_what_is_written(tmp_path):
    found = profiles(rows(), {"plain": {}, "mine": {"draft": Work(5, 6, 7)}})
    write_profiles(tmp_path, {"set": found})
    written = json.loads((tmp_path / "profile.json").read_text())["set"][1]
    assert written["efficiency"] == pytest.approx(0.7)
    assert written["stages"][0]["work"] == {"flops": 5, "bytes": 6, "calls": 7}
