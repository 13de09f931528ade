"""The tables of an evaluation along several files: what is pooled, and what is not."""

import json
import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "eval_tables.py"


def results(drafts, tvd, tau):
    curve = {"drafts": drafts, "tvd": tvd, "coverage": {"1": tvd}}
    arm = {
        "block_efficiency": tau,
        "by_budget": {"4": tau, "15": tau + 1},
        "calibration": {"expected_accepted": 2.0, "accepted": 1.5},
        "depths": {"backbone": curve},
        "real": {"block_efficiency": tau, "simulated": tau + 0.25, "texts": 4, "same_texts": 3},
    }
    bare = {**arm, "depths": {}, "by_budget": {}}
    del bare["real"]
    # Two arms share the backbone; of the third nothing but its steps is known.
    marginal = {**curve, "tvd": [value and value / 2 for value in tvd], "sampling_error": tvd}
    return {"texts": 4, "arms": {"one": arm, "two": arm, "bare": bare}, "true marginal": marginal}


def shown(capsys, *arguments):
    runpy.run_path(str(BENCHMARK))["main"](arguments)
    return capsys.readouterr().out.splitlines()


def test_distances_are_pooled_by_drafts_and_steps_are_not(tmp_path, capsys):
    for name, found in (("a", results([3, 1], [0.2, 0.5], 2.0)), ("b", results([1, 0], [0.6, None], 3.0))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.json").write_text(json.dumps(found))
    lines = shown(capsys, str(tmp_path))
    assert lines[0] == "a: 4 texts, b: 4 texts"
    # Three drafts of 0.2 and one of 0.6; of the second depth one alone.
    assert [line for line in lines if "distance" in line] == [
        "| one: backbone: distance by depth | 0.30 | 0.50 |",
        "| true marginal: distance by depth | 0.15 | 0.25 |",
    ]
    assert "| true marginal: sampling error | 0.30 | 0.50 |" in lines
    assert "| one: backbone: among the 1 likeliest | 0.30 | 0.50 |" in lines
    assert "| bare | 2.00 | 3.00 | 2.50 |" in lines
    assert "| b, two, with 4, 15 | 3.00 | 4.00 |" in lines
    assert "| a, bare | 2.00 | 1.50 |" in lines
    assert "| b, one: real, simulated; 3 of 4 texts the same | 3.00 | 3.25 |" in lines
    assert not any("bare" in line and ("real" in line or "with" in line) for line in lines)


def test_a_folder_without_results_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        shown(capsys, str(tmp_path))
    assert stop.value.code == 2
    assert str(tmp_path) in capsys.readouterr().err
