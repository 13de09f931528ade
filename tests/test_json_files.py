"""JSON from outside: an object, or one error that names the file."""

import pytest

from treeflash.checkpoints.reader import Checkpoint
from treeflash.checkpoints.shortlist import read_shortlist
from treeflash.errors import CheckpointError, InputError, TreeflashError
from treeflash.evaluation.bench import read_runs
from treeflash.json_files import parse_json, read_json
from treeflash.prompts import read_prompts
from treeflash.training.answers import AnswerStore
from treeflash.training.checkpointing import Snapshots
from treeflash.training.checksums import append_sum
from treeflash.training.folders import read_manifest
from treeflash.training.metrics import read_metrics

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"{'a': 1}", "not valid JSON (Expecting property name"),
        (b"", "not valid JSON (Expecting value"),
        (b'{"a": "\xff"}', "line 1 is not UTF-8 (byte 0xff at column 8)"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON (Exceeds the limit"),
        (b"[1]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
        (DEEP.encode(), "not valid JSON (nested more than 100 levels deep)"),
        (b'{"a": ' * 100_000, "not valid JSON (nested more than 100 levels deep)"),
        (b'{"a": ' * 101 + b"0" + b"}" * 101, "not valid JSON (nested more than 100 levels deep)"),
    ],
)
def test_anything_but_an_object_is_one_error_that_names_the_file(content, reason, tmp_path):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content)
    for kind in (InputError, CheckpointError):
        with pytest.raises(kind) as error:
            read_json(path, kind)
        assert str(error.value).startswith(f"{path}: {reason}")


def test_what_is_not_too_deep_is_read():
    assert parse_json('{"a": ' * 100 + "0" + "}" * 100)
    assert parse_json(f"[{'[1], ' * 500}0]")[-2:] == [[1], 0]


READERS = {
    "config": ("config.json", lambda path: Checkpoint.open(path.parent)),
    "index": ("model.safetensors.index.json", lambda path: Checkpoint.open(path.parent)),
    "shortlist": ("shortlist.json", lambda path: read_shortlist(path.parent, 128, [])),
    "prompts": ("prompts.jsonl", read_prompts),
    "array of prompts": ("prompts.json", read_prompts),
    "answers": ("answers-00000.jsonl", lambda path: list(AnswerStore(path.parent).rows())),
    "runs": ("runs.jsonl", lambda path: list(read_runs(path.parent))),
    "manifest": ("bench.json", lambda path: read_manifest(path.parent, path.name, "a measurement")),
    "snapshot": ("state.json", lambda path: Snapshots(path.parent, 1).read(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_gives_a_traceback_for_what_is_too_deep(name, tmp_path):
    file, read = READERS[name]
    if name == "index":
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(('{"a": ' if name == "prompts" else "") + DEEP + "\n")
    append_sum(tmp_path / file)  # of some it is checked first
    with pytest.raises(TreeflashError, match=r"nested more than 100|not valid JSON; expected") as error:
        read(tmp_path / file)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("last", [DEEP.encode(), b'{"step": 2, "loss": "\xff', b"[1]", b'{"loss": 1}'])
def test_the_record_of_a_run_holds_no_other_lines(last, tmp_path):
    """But for a last one that a kill cut short."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + last + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: line 2"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"st')
    assert read_metrics(tmp_path) == [{"step": 1}]
