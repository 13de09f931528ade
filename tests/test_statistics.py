import pytest

from treeflash.statistics import Statistics, StepRecord


def run(*steps):
    return Statistics(
        [StepRecord(7, depth, accepted, emitted) for depth, accepted, emitted in steps], 0.5, 2.0
    )


def test_block_efficiency_is_a_ratio_of_sums():
    assert run((3, 3, 4), (3, 0, 1)).block_efficiency == 2.5
    assert run().block_efficiency == 0


def test_acceptance_per_depth():
    statistics = run((3, 3, 4), (3, 1, 2), (2, 0, 1), (0, 0, 1))
    assert statistics.accepted_per_depth == [2, 1, 1]
    assert statistics.drafted_per_depth == [3, 3, 2]


def test_stages_add_up():
    steps = [StepRecord(1, 1, 1, 1, {"draft": 1.0, "verify": 2.0}), StepRecord(1, 1, 1, 1, {"verify": 3.0})]
    assert Statistics(steps, 0, 0).seconds_per_stage == {"draft": 1.0, "verify": pytest.approx(5.0)}
