"""`treeflash bench` as a user runs it."""

import json

import pytest


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "small.jsonl"
    path.write_text('{"prompt": "Ana has 7 apples."}\n{"prompt": "Ben has 3 plums."}\n')
    return path


def test_a_table_and_a_report(command, prompts, tmp_path):
    words = ["bench", "tiny-ddtree", "small=tiny-treeflash,selector.budget=7", "--prompts", prompts]
    words += ["--out", tmp_path / "out", "--max-new-tokens", 16, "-o", "target.device=cpu"]
    status, out, _ = command(*words)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].strip() == "small, 2 prompts"
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ") and line.strip()}
    assert rows["plain"][0] == "1.00"
    # The same as plain decoding: both prompts, none nearly, none wrong.
    for arm in ("plain", "tiny-ddtree", "small"):
        assert rows[arm][-3:] == ["2", "0", "0"]
    assert lines[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["small"]
    assert [row["arm"] for row in results] == ["plain", "tiny-ddtree", "small"]
    # Again: nothing is measured anew, and everything is shown.
    before = (tmp_path / "out" / "runs.jsonl").read_text()
    assert command(*words)[1] == out
    assert (tmp_path / "out" / "runs.jsonl").read_text() == before


def test_on_a_narrow_screen_the_name_gives_way(command, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    arm = "tiny-treeflash,selector.budget=7,builder.branching=4"
    words = ["bench", arm, "--prompts", prompts, "--limit", 1, "--out", tmp_path / "out"]
    status, out, _ = command(*words, "--max-new-tokens", 8, "-o", "target.device=cpu")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].strip() == "small, 1 prompt"
    heads = next(line for line in lines if "tau" in line).split()
    assert heads == ["arm", "tau", "tokens/s", "speedup", "(95", "%)", "same", "tie", "wrong"]
    row = next(line for line in lines if "tiny-treeflash" in line).split()
    assert row[-4:] == ["-", "1", "0", "0"]
    assert max(map(len, lines[: lines.index(next(line for line in lines if "report:" in line))])) <= 80


def test_a_profile(command, prompts, tmp_path):
    words = ["bench", "tiny-treeflash", "--prompts", prompts, "--limit", 1, "--profile"]
    words += ["--out", tmp_path / "out", "--max-new-tokens", 16, "-o", "target.device=cpu"]
    status, out, _ = command(*words)
    assert status == 0
    assert "small, tiny-treeflash: a step of" in out
    assert "ms, the target's own pass" in out
    assert "% as fast as if all else were free" in out
    measured = json.loads((tmp_path / "out" / "results.json").read_text())["results"]["small"]
    for arm in measured:
        assert 0 < arm["pass_seconds"] < arm["seconds"]["verify"]
    written = json.loads((tmp_path / "out" / "profile.json").read_text())["small"]
    plain, tree = written
    assert [part["arm"] for part in written] == ["plain", "tiny-treeflash"]
    names = [stage["name"] for stage in tree["stages"]]
    assert names == ["draft", "build", "refine", "select", "verify", "commit", "rest"]
    # A tree is more work than one node.
    work = {stage["name"]: stage["work"] for stage in tree["stages"]}
    alone = {stage["name"]: stage["work"] for stage in plain["stages"]}
    assert work["verify"]["flops"] > 3 * alone["verify"]["flops"] > 0
    assert 0 < tree["efficiency"] <= 1.05


MISTAKES = {
    "no arm": (["--prompts", "FILE"], "Missing argument 'ARM...'"),
    "no such recipe": (["tiny-treflash", "--prompts", "FILE"], "did you mean 'tiny-treeflash'"),
    "no such prompts": (["tiny-ddtree", "--prompts", "gms8k"], "did you mean 'gsm8k'"),
    "a set twice": (["tiny-ddtree", "--prompts", "FILE", "--prompts", "FILE"], "sets of different names"),
    "a training recipe": (["tiny-train", "--prompts", "FILE"], "this recipe trains a drafter"),
    "a key misspelled": (["tiny-ddtree,selector.bugdet=3", "--prompts", "FILE"], "did you mean 'budget'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake(case, command, prompts, tmp_path):
    words, fault = MISTAKES[case]
    words = [str(prompts) if word == "FILE" else word for word in words]
    status, _, err = command("bench", *words, "--out", tmp_path / "out", "-o", "target.device=cpu")
    assert status == 2
    assert fault in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
