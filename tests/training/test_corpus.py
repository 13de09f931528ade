"""Data directories as they are read for training: what is taken, cut, counted and refused."""

import json

import pytest
import torch

from treeflash.errors import InputError
from treeflash.training import token_file
from treeflash.training.answers import AnswerStore
from treeflash.training.checksums import append_sum
from treeflash.training.corpus import Corpus
from treeflash.training.texts import Text, pack, passes

DIGEST = "0123456789abcdef"
ROWS = [
    ("train", [2, 5, 5, 9], [7, 7, 8]),
    ("heldout", [2, 5], [7]),
    ("train", [2, 6], [8, 7, 4, 4]),
    ("train", [2, 6], []),
    ("heldout", [2, 9], [1, 1, 1]),
]


@pytest.fixture
def read(write_data, tmp_path):
    def read(rows=ROWS, length=64, heldout_texts=32, digest=DIGEST):
        folder = write_data(tmp_path / f"data-{len(list(tmp_path.iterdir()))}", DIGEST, rows)
        return Corpus.read([folder], digest, length, heldout_texts)

    return read


def test_texts_by_split(read):
    corpus = read()
    assert list(corpus.train) == [Text([2, 5, 5, 9], [7, 7, 8]), Text([2, 6], [8, 7, 4, 4])]
    assert list(corpus.heldout) == [Text([2, 5], [7]), Text([2, 9], [1, 1, 1])]
    assert list(corpus.texts) == [*corpus.train, *corpus.heldout]
    assert [text.length for text in corpus.texts] == [7, 6, 3, 5]
    assert list(read(heldout_texts=1).heldout) == list(corpus.heldout[:1])


def test_answers_are_cut(read):
    corpus = read([*ROWS, ("train", list(range(8)), [1, 2, 3])], length=9)
    assert corpus.train[-1] == Text(list(range(8)), [1])
    assert max(text.length for text in corpus.texts) <= 9


def test_regenerated_answers(data, cpu_target):
    corpus = Corpus.read([data], cpu_target.digest(), 512, 100)
    rows = list(AnswerStore(data).rows())
    assert len(corpus.train) == sum(row.split == "train" for row in rows) == 34
    assert len(corpus.heldout) == sum(row.split == "heldout" for row in rows) == 6


def test_several_folders(write_data, tmp_path):
    one = write_data(tmp_path / "one", DIGEST, ROWS[:2])
    two = write_data(tmp_path / "two", DIGEST, ROWS[2:])
    both = Corpus.read([one, two], DIGEST, 64, 32)
    assert [len(both.train), len(both.heldout)] == [2, 2]
    with pytest.raises(InputError, match="two: expected answers to train on, found none"):
        Corpus.read([write_data(tmp_path / "none" / "two", DIGEST, ROWS[1:2])], DIGEST, 64, 32)


def test_what_one_folder_holds_out_is_not_learned_from_another(write_data, tmp_path):
    one = write_data(tmp_path / "one", DIGEST, [("train", [2], [5]), ("train", [3], [6])])
    two = write_data(tmp_path / "two", DIGEST, [("train", [2], [5]), ("heldout", [3], [6])])
    both = Corpus.read([one, two], DIGEST, 64, 32)
    assert list(both.train) == [Text([2], [5])] * 2
    assert list(both.heldout) == [Text([3], [6])]


def test_fingerprint(read):
    first = read().fingerprint
    assert first == read().fingerprint
    others = [
        read(ROWS[1:]),
        read([ROWS[2], ROWS[1], ROWS[0], *ROWS[3:]]),
        read([("train", [2, 5, 5], [9, 7, 7, 8]), *ROWS[1:]]),
        read([("train", [2, 5, 5, 9], [7, 7, 9]), *ROWS[1:]]),
        read(heldout_texts=1),
        read(length=8, rows=[*ROWS, ("train", [2, 6], [8] * 9)]),
        read(length=9, rows=[*ROWS, ("train", [2, 6], [8] * 9)]),
    ]
    assert len({first, *(other.fingerprint for other in others)}) == len(others) + 1


def test_fingerprint_of_another_split(read):
    rows = [("train", [2], [5]), ("train", [3], [6]), ("heldout", [4], [7])]
    assert read(rows).fingerprint != read([rows[0], ("heldout", *rows[1][1:]), rows[2]]).fingerprint


def test_another_target(read):
    with pytest.raises(
        InputError, match=f"another target's: expected those of other, found those of {DIGEST}"
    ):
        read(digest="other")


def test_prompts_that_leave_no_room(read):
    long = [("train", list(range(8 + number)), [1]) for number in range(12)]
    with pytest.raises(InputError) as error:
        read([*ROWS, *long], length=8)
    message = str(error.value)
    assert "prompts that leave no room in data.length = 8: 12 faults" in message
    assert "prompt 0000000000000005 has 8 tokens" in message
    assert message.endswith("\n  - and 2 more like these")


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ([ROWS[1]], "expected answers to train on, found none"),
        (
            [ROWS[0]],
            "expected held-out answers to measure on, found none; regenerate with a greater --heldout",
        ),
        ([("train", [2, 6], []), ROWS[1]], "expected answers to train on, found none"),
    ],
)
def test_nothing_to_read(read, rows, fault):
    with pytest.raises(InputError, match=fault):
        read(rows)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(InputError, match="absent: expected a folder made by treeflash regenerate"):
        Corpus.read([tmp_path / "absent"], DIGEST, 64, 32)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(InputError, match=r"dataset\.json: not valid JSON"):
        Corpus.read([tmp_path], DIGEST, 64, 32)
    (tmp_path / "dataset.json").write_text(json.dumps({"target": DIGEST, "rows": 1}))
    with pytest.raises(InputError, match=r"SHA256SUMS: has no sum of dataset\.json; start the treeflash reg"):
        Corpus.read([tmp_path], DIGEST, 64, 32)


FINE = {
    "key": "0" * 16,
    "turn": 0,
    "split": "train",
    "prompt_ids": [2],
    "answer_ids": [3],
    "text": "",
    "stop_reason": "",
}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"\xff", r"line 2 is not UTF-8 \(byte 0xff at column 1\)"),
        ("{", "line 2: not valid JSON"),
        ("[" * 100_000, "line 2: not valid JSON"),
        ("3", "line 2 is not an answer"),
        ({"key": 1}, "line 2 is not an answer"),
        ({**FINE, "key": "a/b"}, "line 2 is not an answer"),
        ({**FINE, "turn": -1}, "line 2 is not an answer"),
        ({**FINE, "split": "test"}, "line 2 is not an answer"),
        ({**FINE, "answer_ids": [True]}, "line 2 is not an answer .answer_ids: expected a list of token ids"),
        ({**FINE, "answer_ids": [-1]}, "line 2 is not an answer .answer_ids: expected a list of token ids"),
        (
            {**FINE, "answer_ids": [2**31]},
            "line 2 is not an answer .answer_ids: expected a list of token ids",
        ),
        ({**FINE, "prompt_ids": "ab"}, "line 2 is not an answer .prompt_ids: expected a list of token ids"),
        ({**FINE, "prompt_ids": []}, "line 2 is not an answer .prompt_ids: expected one token or more"),
    ],
    ids=str,
)
def test_a_line_that_is_none(write_data, tmp_path, line, fault):
    """Even where its sum was made anew."""
    folder = write_data(tmp_path / "data", DIGEST, ROWS[:1])
    path = folder / "answers-00000.jsonl"
    text = line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
    path.write_bytes(path.read_bytes() + text + b"\n")
    append_sum(path)
    with pytest.raises(InputError, match=rf"answers-00000\.jsonl: {fault}"):
        Corpus.read([folder], DIGEST, 64, 32)


@pytest.mark.parametrize("name", ["answers-00000.jsonl", "dataset.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_damage_is_not_read(write_data, tmp_path, name, damage):
    """A file cut between two lines looks whole, and a changed digit looks right."""
    folder = write_data(tmp_path / "data", DIGEST, ROWS)
    path = folder / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: data[:-1].rfind(b"\n") + 1] if damage == "cut" else data.replace(b"5", b"6"))
    with pytest.raises(InputError) as error:
        Corpus.read([folder], DIGEST, 64, 32)
    assert str(error.value).startswith(str(folder))


def test_tokens_are_mapped_and_made_once(write_data, tmp_path, monkeypatch):
    folder = write_data(tmp_path / "data", DIGEST, ROWS)
    first = Corpus.read([folder], DIGEST, 64, 32)
    (tokens,) = first.train.arrays
    assert tokens.dtype == torch.int32
    assert not (folder / "tokens.safetensors").stat().st_mode & 0o600 ^ 0o600
    with monkeypatch.context() as patch:
        patch.setattr(AnswerStore, "rows", lambda *_: pytest.fail("read again"))
        assert Corpus.read([folder], DIGEST, 64, 32).fingerprint == first.fingerprint
    # Damaged, or of other answers, it is made again.
    path = folder / "tokens.safetensors"
    data = path.read_bytes()
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-9], b"", data[:40] + b"\xff" + data[41:]):
        path.write_bytes(damaged)
        assert Corpus.read([folder], DIGEST, 64, 32).fingerprint == first.fingerprint
        assert path.read_bytes() == data
    line = (folder / "answers-00000.jsonl").read_text().replace("[7, 7, 8]", "[7, 7, 9]")
    (folder / "answers-00000.jsonl").write_text(line)
    append_sum(folder / "answers-00000.jsonl")
    assert Corpus.read([folder], DIGEST, 64, 32).train[0] == Text([2, 5, 5, 9], [7, 7, 9])


def test_a_data_directory_that_takes_no_file(write_data, tmp_path, monkeypatch):
    folder = write_data(tmp_path / "data", DIGEST, ROWS)

    def full(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(token_file, "write_tensors", full)
    assert Corpus.read([folder], DIGEST, 64, 32).train[0] == Text([2, 5, 5, 9], [7, 7, 8])
    assert not list(folder.glob("*.safetensors"))


def test_a_manifest_that_is_none(tmp_path):
    (tmp_path / "dataset.json").write_text("[]")
    with pytest.raises(InputError, match=r"dataset\.json: expected a JSON object, found list"):
        Corpus.read([tmp_path], DIGEST, 64, 32)


def test_shortlist_takes_answers_then_prompts_then_ids(read):
    corpus = read()  # 7 is answered three times, 4 and 8 twice; 2 and 5 are asked twice, 6 and 9 once
    assert corpus.shortlist(3, 16).tolist() == [4, 7, 8]
    assert corpus.shortlist(5, 16).tolist() == [2, 4, 5, 7, 8]
    assert corpus.shortlist(7, 16).tolist() == [2, 4, 5, 6, 7, 8, 9]
    assert corpus.shortlist(8, 16).tolist() == [0, 2, 4, 5, 6, 7, 8, 9]
    assert corpus.shortlist(99, 16).tolist() == list(range(16))
    assert corpus.shortlist(1, 16).tolist() == [7]
    assert corpus.shortlist(2, 16).tolist() == [4, 7]


@pytest.mark.parametrize(
    ("lengths", "limit", "expected"),
    [
        ([], 8, []),
        ([3, 5, 1], 8, [[0, 1], [2]]),
        ([8, 8], 8, [[0], [1]]),
        ([4, 5, 4, 4], 8, [[0], [1], [2, 3]]),
        ([1, 1, 1], 8, [[0, 1, 2]]),
    ],
)
def test_passes(lengths, limit, expected):
    assert passes(lengths, limit) == expected


def test_pack():
    row = pack([Text([1, 2], [3]), Text([4], [5, 6])])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.text_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert (row.bounds, row.answers) == ((0, 3, 6), (2, 4))
    assert [row.begin_before(place) for place in range(6)] == [0, 0, 0, 3, 3, 3]
    assert [row.end_behind(place) for place in range(6)] == [3, 3, 3, 6, 6, 6]
