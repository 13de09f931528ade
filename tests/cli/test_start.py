"""Commands that need neither torch nor transformers start, and tell mistakes, without importing them."""

import json
import subprocess
import sys

import pytest

SLOW = ["torch", "transformers", "numpy", "matplotlib"]
COMMANDS = "bench cache check completion components eval generate recipes regenerate study train".split()
PROMPT = "Ana has 7 apples."
# Arguments, exit status, and what is printed or told.
LINES = {
    **{f"help of {name}": ([name, "--help"], 0, "Usage: ") for name in COMMANDS},
    "list": (["recipes", "list"], 0, "tiny-treeflash"),
    "script": (["completion", "bash"], 0, "_treeflash_completion"),
    "unknown recipe": (["generate", "tiny-treeflsh", PROMPT], 2, "did you mean 'tiny-treeflash'"),
    "missing file": (["generate", "nowhere.toml", PROMPT], 2, "no recipe file nowhere.toml"),
    "not TOML": (["generate", "BROKEN", PROMPT], 2, "not valid TOML"),
    "unknown table": (["generate", "tiny-plain", PROMPT, "-o", "selectr.budget=3"], 2, "'selector'"),
    "unknown option": (["generate", "tiny-plain", PROMPT, "-o", "target.dtyp=3"], 2, "did you mean 'dtype'"),
    "wrong value": (["generate", "tiny-plain", PROMPT, "-o", "target.lean=3"], 2, "true or false, found 3"),
    "bad override": (["generate", "tiny-plain", PROMPT, "-o", "budget=3"], 2, "expected table.key=value"),
    "missing argument": (["generate"], 2, "Missing argument 'RECIPE'"),
    "wrong flag value": (["generate", "tiny-plain", PROMPT, "--seed", "x"], 2, "'x' is not a valid integer"),
    "wrong dtype": (["generate", "tiny-plain", PROMPT, "--dtype", "int8"], 2, "found 'int8'"),
    "empty prompt": (["generate", "tiny-plain", ""], 2, "the prompt is empty"),
    "training": (["generate", "tiny-train", PROMPT], 2, "this recipe trains a drafter"),
    "no training": (["train", "tiny-plain", "--data", "d", "--out", "o"], 2, "it does not train"),
    "no data": (["train", "tiny-train", "--data", "nowhere", "--out", "o"], 2, "nowhere: expected a folder"),
    "wrong setting": (
        ["train", "tiny-train", "--data", "d", "--out", "o", "-o", "train.steps=0"],
        2,
        "train.steps: expected >= 1, found 0",
    ),
    "check": (["check", "tiny-treflash"], 2, "did you mean"),
    "show": (["recipes", "show", "tiny-treflash"], 2, "did you mean"),
    "no prompts": (["regenerate", "tiny-plain", "--prompts", "nowhere", "--out", "o"], 2, "cannot be read"),
    "bench arm": (["bench", "tiny-treflash", "--prompts", "p", "--out", "o"], 2, "did you mean"),
    "bench prompts": (["bench", "tiny-dflash", "--prompts", "p", "--out", "o"], 2, "expected a file or"),
    "eval arm": (["eval", "tiny-treflash", "--data", "d", "--out", "o"], 2, "did you mean"),
    "eval data": (["eval", "tiny-dflash", "--data", "nowhere", "--out", "o"], 2, "nowhere: expected"),
    "eval budgets": (["eval", "tiny-dflash", "--data", "d", "--out", "o", "--budgets", "0"], 2, "15,63"),
    "study": (["study", "tinny", "--prompts", ".", "--out", "o"], 2, "did you mean 'tiny'"),
    "kind": (["components", "drafer"], 2, "did you mean 'drafter'"),
    "command": (["generat"], 2, "did you mean 'generate'"),
    "subcommand": (["recipes", "lst"], 2, "did you mean 'list'"),
}
# As a shell asks what may stand where the cursor is.
TABS = {"treeflash gen": "generate", "treeflash generate tiny-pl": "tiny-plain", "treeflash study ti": "tiny"}
SCRIPT = """
import contextlib, io, json, os, sys
from treeflash.cli import main

lines, slow = json.load(sys.stdin)
answers = {}
for name, (words, variables) in lines.items():
    sys.argv = ["treeflash", *words]
    os.environ |= variables
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as stop:
        out.seek(0)
        answers[name] = [stop.code, out.read(), sorted({*slow} & sys.modules.keys())]
json.dump(answers, sys.stdout)
"""


def completion(text):
    words = {"COMP_WORDS": text, "COMP_CWORD": str(text.count(" "))}
    return [[], {"_TREEFLASH_COMPLETE": "bash_complete", **words}]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Of each line: exit status, what was printed, and the slow modules imported by then. In one process."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "BROKEN.toml").write_text("[target")
    asked = {name: [words, {}] for name, (words, *_) in LINES.items()} | {
        text: completion(text) for text in TABS
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([asked, SLOW]),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_answered_without_torch(name, answers):
    _, status, part = LINES[name]
    found, text, imported = answers[name]
    assert (found, imported) == (status, [])
    assert part in text
    assert "Traceback" not in text


@pytest.mark.parametrize("text", TABS)
def test_a_tab_is_answered_without_torch(text, answers):
    status, out, imported = answers[text]
    assert (status, imported) == (0, [])
    assert TABS[text] in [line.partition(",")[2] for line in out.splitlines()]
