"""From prompts to a drafter as a new user does it, and what the command says to mistakes."""

import json
import sys

import pytest

from treeflash.training.answers import AnswerStore

PROMPTS = [
    f"{name} has {count} coins. {name}" for name in ("Ana", "Ben", "Cho", "Dee") for count in (3, 5, 8)
]
SMALL = ["drafter.block_size=4", "drafter.layers=1", "drafter.intermediate_size=16", "drafter.anchors=4"]
SMALL += ["data.batch_size=4", "train.steps=3", "target.device=cpu"]
OPTIONS = [word for setting in SMALL for word in ("-o", setting)]


@pytest.fixture
def data(command, tmp_path):
    """A data directory, made by the command before."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = ["--prompts", file, "--out", tmp_path / "data", "--max-new-tokens", "20", "--heldout", "0.3"]
    status, out, _ = command("regenerate", "tiny-plain", *words, "-o", "target.device=cpu")
    assert status == 0
    assert "12 answers" in out
    return tmp_path / "data"


def test_from_prompts_to_text(command, data, tmp_path):
    out = tmp_path / "run"
    status, said, err = command("train", "tiny-train", "--data", data, "--out", out, *OPTIONS)
    assert status == 0
    recipe = out / "drafter" / "recipe.toml"
    assert said.splitlines()[-1] == f"decode with it: treeflash generate {recipe} ..."
    assert "texts to train on" in err + said
    assert {path.name for path in out.iterdir()} >= {"loss.png", "acceptance.png", "states", "drafter"}
    words = [PROMPTS[0], "--max-new-tokens", "12", "--json"]
    status, mine, err = command("generate", recipe, *words)
    assert (status, err) == (0, "")
    status, plain, _ = command("generate", "tiny-plain", *words)
    assert json.loads(mine)["text"] == json.loads(plain)["text"]
    status, again, _ = command("train", "tiny-train", "--data", data, "--out", out, *OPTIONS)
    assert (status, again.splitlines()[-1]) == (0, said.splitlines()[-1])
    status, _, err = command(
        "train", "tiny-train", "--data", data, "--out", out, *OPTIONS, "-o", "train.seed=1"
    )
    assert status == 2
    assert "was begun with other settings" in err
    assert "train.seed: expected None as before, found 1" in err


def test_measurements_are_shown(command, data, tmp_path):
    status, _, err = command("train", "tiny-train", "--data", data, "--out", tmp_path / "run", *OPTIONS)
    assert status == 0
    (first, last) = (line for line in err.splitlines() if line.startswith("step "))
    assert first.startswith("step 0, tokens a step held out: backbone 1.")
    assert last.startswith("step 3, tokens a step held out: backbone ")
    assert "refined" in last


MISTAKES = {
    "missing data": (
        ["tiny-train", "--data", "{there}/absent"],
        "absent: expected a folder made by treeflash",
    ),
    "no data directory": (
        ["tiny-train", "--data", "{there}/file"],
        "file: expected a folder made by treeflash",
    ),
    "empty folder": (["tiny-train", "--data", "{there}"], "expected a folder made by treeflash regenerate"),
    "misspelled recipe": (["tiny-tran", "--data", "{there}"], "did you mean 'tiny-train'"),
    "a recipe that decodes": (["tiny-plain", "--data", "{there}"], "this recipe decodes, it does not train"),
    "misspelled key": (
        ["tiny-train", "--data", "{there}", "-o", "train.stesp=3"],
        "train.stesp: unknown key; did you mean 'steps'?",
    ),
    "malformed override": (["tiny-train", "--data", "{there}", "-o", "steps"], "expected table.key=value"),
    "bad device": (
        ["tiny-train", "--data", "{there}/begun", "-o", "target.device=abacus"],
        "abacus",
    ),
    "missing target": (
        ["tiny-train", "--data", "{there}/begun", "-o", "target.model=nowhere"],
        "no folder, hub name or target is called 'nowhere'",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake(case, command, tmp_path):
    (tmp_path / "file").write_text("text")
    AnswerStore(tmp_path / "begun").open({})
    words, fault = MISTAKES[case]
    words = [word.format(there=tmp_path) for word in words]
    status, out, err = command("train", *words, "--out", tmp_path / "run")
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert err.count("treeflash: ") == 1
    said = err[err.index("treeflash: ") :]
    assert fault in said
    assert said.count("\n") == 1 + said.count("\n  - ")
    assert not (tmp_path / "run").exists()


def test_a_mistake_is_one_line(command, tmp_path):
    _, _, err = command("train", "tiny-train", "--data", tmp_path / "absent", "--out", tmp_path / "run")
    assert len(err.splitlines()) == 1


def test_a_file_in_the_place_of_the_run(command, data, tmp_path):
    (tmp_path / "run").write_text("text")
    status, out, err = command("train", "tiny-train", "--data", data, "--out", tmp_path / "run", *OPTIONS)
    assert (status, out) == (2, "")
    assert "cannot be made" in err


@pytest.mark.parametrize(
    "words", [["tiny-train"], ["tiny-train", "--data", "x"], ["tiny-train", "--out", "x"], ["--data", "x"]]
)
def test_usage(words, command):
    status, out, err = command("train", *words)
    assert (status, out) == (2, "")
    assert "Error: Missing" in err
    assert "Traceback" not in err


def test_help(command):
    status, out, err = command("train", "--help")
    assert (status, err) == (0, "")
    assert "goes on from its last checkpoint" in " ".join(out.split())


@pytest.mark.parametrize("package", ["accelerate", "matplotlib", "tensorboard"])
def test_training_packages_are_missing(command, data, tmp_path, monkeypatch, package):
    """Said before the first step, also of what is needed behind the last."""
    monkeypatch.setitem(sys.modules, package, None)
    options = [*OPTIONS, "-o", "train.tensorboard=true"]
    status, _, err = command("train", "tiny-train", "--data", data, "--out", tmp_path / "run", *options)
    assert status == 2
    assert f"training needs {package}, expected to be installed: python -m pip install {package}\n" in err
    assert not (tmp_path / "run").exists()
