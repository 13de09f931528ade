"""Prompt sets: from files in the upstream forms, worded as papers do, drawn or in order."""

import json
import sys
import types

import pytest

from treeflash.errors import InputError
from treeflash.evaluation.prompt_sets import KNOWN, open_set, same_names
from treeflash.prompts import read_prompts


@pytest.fixture
def write(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def turns(found):
    return [prompt.turns for prompt in found.prompts]


def everything(place, **settings):
    return open_set(place, **{"limit": None, "draw": None, **settings})


UPSTREAM = {
    "gsm8k": {"question": "How many?", "answer": "2"},
    "math500": {"problem": "What is 1+1?", "answer": "2"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n    ", "entry_point": "add"},
    "mbpp": {"text": "Write a function.", "code": "...", "task_id": 11},
    "mt-bench": {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]},
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_sets_are_worded_as_papers_do(name, write):
    path = write(UPSTREAM[name])
    found = everything(f"{name}={path}")
    assert (found.name, found.source) == (name, str(path))
    (said,) = turns(found)
    wording = {
        "gsm8k": ("How many?\nReason step by step, and put the final answer in \\boxed{}.",),
        "math500": ("What is 1+1?\nReason step by step, and put the final answer in \\boxed{}.",),
        "humaneval": (
            "Write a solution to this problem that passes its tests.\n```python\ndef add(a, b):\n```",
        ),
        "mbpp": ("Write a function.",),
        "mt-bench": ("Write.", "Rewrite."),
    }
    assert said == wording[name]
    (bare,) = turns(everything(f"{name}={path}", reworded=False))
    key = next(key for key in ("turns", "prompt", "question", "problem", "text") if key in UPSTREAM[name])
    assert bare == (tuple(UPSTREAM[name][key]) if key == "turns" else (UPSTREAM[name][key],))


def test_who_asks_for_steps_and_a_box_is_not_asked_again(write):
    asked = "What is 1+1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    path = write({"prompt": asked}, {"prompt": "What of \\boxed{2}?"})
    added = "\nReason step by step, and put the final answer in \\boxed{}."
    assert turns(everything(f"math500={path}")) == [(asked,), (f"What of \\boxed{{2}}?{added}",)]


def test_mbpp_is_measured_on_its_test_rows(write):
    rows = [{"text": f"Task {number}.", "task_id": number} for number in (1, 10, 11, 510, 511, 974)]
    path = write(*rows, {"text": "Task of no number."}, {"text": "Task by name.", "task_id": "Mbpp/3"})
    kept = [("Task 11.",), ("Task 510.",), ("Task of no number.",), ("Task by name.",)]
    assert turns(everything(f"mbpp={path}")) == kept
    assert sorted(turns(open_set(f"mbpp={path}", limit=4, draw=1))) == sorted(kept)
    assert len(turns(everything(f"mbpp={path}", reworded=False))) == 8
    assert len(turns(everything(str(path)))) == 8
    array = path.with_suffix(".json")
    array.write_text(json.dumps(rows))
    assert turns(everything(f"mbpp={array}")) == kept[:2]
    path = write(*rows[-2:])
    with pytest.raises(
        InputError, match=r"a task_id of 11 to 510, .* found 511 to 974; --as-it-is takes all"
    ):
        everything(f"mbpp={path}")


@pytest.mark.parametrize(
    ("places", "fault"),
    [
        (["a/toy.jsonl", "gsm8k=b/toy.jsonl", "gsm9k"], None),
        (["toy.jsonl", "b/toy.jsonl"], "expected sets of different names, found toy twice"),
        (["mbpp", "x.jsonl", "mbpp=a.jsonl", "x"], "expected sets of different names, found mbpp, x twice"),
    ],
)
def test_sets_of_one_name(places, fault):
    assert same_names(places) == fault


def test_any_file_is_taken_as_it_is(write):
    found = everything(str(write({"question": "How many?"}, name="mine.jsonl")))
    assert (found.name, turns(found)) == ("mine", [("How many?",)])


def test_blank_lines_are_no_rows(tmp_path):
    path = tmp_path / "set.jsonl"
    rows = [json.dumps({"prompt": str(index)}) for index in range(4)]
    for text in ("\n\n".join(["", *rows, ""]), "\n\n[" + ",\n".join(rows) + "]\n"):
        path.write_text(text)
        assert turns(open_set(str(path), limit=3, draw=None)) == [("0",), ("1",), ("2",)]
        assert [prompt.turns for prompt in read_prompts(path, limit=3)] == [("0",), ("1",), ("2",)]


def test_limits_and_draws(write):
    path = str(write(*[{"prompt": str(index)} for index in range(20)]))
    assert turns(open_set(path, limit=3, draw=None)) == [("0",), ("1",), ("2",)]
    drawn = open_set(path, limit=8, draw=42)
    assert turns(drawn) == turns(open_set(path, limit=8, draw=42))
    assert turns(drawn) != turns(open_set(path, limit=8, draw=43))
    assert len(set(turns(drawn))) == 8
    # A smaller draw is the beginning of a larger one.
    assert turns(open_set(path, limit=5, draw=42)) == turns(drawn)[:5]


@pytest.fixture
def hub(monkeypatch):
    """In place of the library: what was asked for, and what comes."""

    def hub(rows):
        asked = []

        def load_dataset(name, config, split):
            asked.append((name, config, split))
            if isinstance(rows, Exception):
                raise rows
            return rows

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return asked

    return hub


@pytest.mark.parametrize("name", KNOWN)
def test_known_sets_come_from_the_hub(name, hub):
    asked = hub([UPSTREAM[name]])
    found = everything(name)
    known = KNOWN[name]
    assert asked == [(known.hub, known.config, known.split)]
    assert (found.name, found.source, len(found.prompts)) == (name, known.hub, 1)


def test_on_the_hub_turns_may_be_called_prompt(hub):
    hub([{"prompt": ["Write.", "Rewrite."]}])
    assert turns(everything("mt-bench")) == [("Write.", "Rewrite.")]


def test_a_hub_that_cannot_be_reached(hub):
    hub(ConnectionError("no route\nmore"))
    with pytest.raises(InputError, match=r"--prompts gsm8k: .* \(no route\); a file works without it"):
        everything("gsm8k")


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs the package datasets .*--prompts gsm8k=FILE"):
        everything("gsm8k")


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("gsm9k=FILE", "no set is called 'gsm9k'; did you mean 'gsm8k'"),
        ("gms8k", "expected a file or a known set, found neither; did you mean 'gsm8k'"),
        ("gsm8k=no/such.jsonl", "no/such.jsonl: cannot be read"),
    ],
)
def test_no_such_set(place, fault):
    with pytest.raises(InputError, match=fault):
        everything(place)


def test_rows_without_text_are_named(hub, write):
    hub([{"question": "a"}, {"answer": "b"}])
    with pytest.raises(InputError, match="openai/gsm8k: row 2: expected one of the keys"):
        everything("gsm8k")
    with pytest.raises(InputError, match="line 1: expected one of the keys"):
        everything(f"gsm8k={write({'answer': 'b'})}")


def test_plain_text_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("What is a tree?\n\n  And a leaf? \nWhat is a tree?\n")
    assert turns(everything(str(path))) == [("What is a tree?",), ("And a leaf?",)]
    assert turns(open_set(str(path), limit=1, draw=None)) == [("What is a tree?",)]
