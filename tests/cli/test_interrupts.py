"""Whoever stops a command that can go on is told so."""

import json

import pytest

from treeflash.training.answers import AnswerStore

STOPPED = {
    "bench": (["tiny-ddtree", "--prompts", "FILE", "--out", "OUT"], "treeflash.evaluation.bench.Bench.run"),
    "regenerate": (
        ["tiny-plain", "--prompts", "FILE", "--out", "OUT"],
        "treeflash.training.regeneration.decode_batch",
    ),
    "train": (["tiny-train", "--data", "DATA", "--out", "OUT"], "treeflash.training.session.train"),
    "study": (["tiny", "--prompts", "DATA", "--out", "OUT"], "treeflash.evaluation.study.Study.run"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_an_interrupt(name, command, tmp_path, monkeypatch):
    words, stopped = STOPPED[name]
    places = {"FILE": tmp_path / "prompts.jsonl", "DATA": tmp_path, "OUT": tmp_path / "out"}
    AnswerStore(tmp_path).open({})
    places["FILE"].write_text(json.dumps({"prompt": "Ana has 7 apples."}))

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(stopped, stop)
    status, out, err = command(name, *(places.get(word, word) for word in words))
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "treeflash: stopped; the same command goes on from here"
