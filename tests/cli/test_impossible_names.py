"""Names that no file can have: one error each, wherever a place is given."""

import json

import pytest

LONG = "x" * 300
BENCH = ["bench", "mine=tiny-plain", "--max-new-tokens", 1]


@pytest.mark.parametrize(
    "words",
    [
        ["generate", f"{LONG}.toml", "hi"],
        ["check", f"{LONG}.toml"],
        ["generate", "tiny-plain", "hi", "-o", f"target.model={LONG}"],
        ["generate", "tiny-treeflash", "hi", "-o", f"drafter.checkpoint={LONG}"],
        ["train", f"{LONG}.toml", "--data", "x", "--out", "{out}"],
        ["train", "tiny-train", "--data", LONG, "--out", "{out}"],
        ["regenerate", "tiny-plain", "--prompts", LONG, "--out", "{out}"],
        ["regenerate", "tiny-plain", "--prompts", "{prompts}", "--out", f"{{out}}/{LONG}"],
        [*BENCH, "--prompts", LONG, "--out", "{out}"],
        [*BENCH, "--prompts", f"mbpp={LONG}", "--out", "{out}"],
        [*BENCH, "--prompts", "{prompts}", "--out", f"{{out}}/{LONG}"],
        ["study", f"{LONG}.toml", "--prompts", "{folder}", "--out", "{out}"],
    ],
    ids=lambda words: " ".join(map(str, words)).replace(LONG, "LONG"),
)
def test_one_error(command, tmp_path, words):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Ana has 7 apples."}))
    places = {"prompts": prompts, "folder": tmp_path, "out": tmp_path / "out"}
    status, out, err = command(*(str(word).format(**places) for word in words))
    assert (status, out) == (2, "")
    last = err.splitlines()[-1]
    assert last.startswith("treeflash: ")
    assert LONG in last
