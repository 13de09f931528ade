"""Data directories: complete, resumable, never half-written, never mixed."""

import gzip
import json

import pytest
from click.testing import CliRunner

from treeflash.cli import commands
from treeflash.engine import Decoder
from treeflash.errors import InputError
from treeflash.prompts import Prompt, read_prompts
from treeflash.training import folders
from treeflash.training.answers import AnswerRow, AnswerStore, split_of
from treeflash.training.corpus import Corpus
from treeflash.training.regeneration import RegenerationSettings, regenerate

NAMES = ["Ana", "Ben", "Cho", "Dee", "Fay", "Hal", "Ina"]
PROMPTS = [Prompt((f"{name} has {count} coins. {name}",)) for name in NAMES for count in (3, 12)]
SETTINGS = RegenerationSettings(max_new_tokens=20, heldout=0.3, batch_size=4)


def run(target, folder, prompts=PROMPTS, settings=SETTINGS, **options):
    return regenerate(target, "tiny", prompts, folder, settings, **options)


def contents(folder):
    """What people read; sums are added in the order of writing."""
    names = ("dataset.json", "answers-*.jsonl")
    return {path.name: path.read_text() for name in names for path in sorted(folder.glob(name))}


def test_every_prompt_is_answered_as_alone(tiny_target, tmp_path):
    rows = list(run(tiny_target, tmp_path / "data").rows())
    assert sorted(row.key for row in rows) == sorted(prompt.key for prompt in PROMPTS)
    decoder = Decoder(tiny_target)
    for row in rows:
        assert row.answer_ids == list(decoder.generate(row.prompt_ids, max_new_tokens=20).token_ids)
        assert row.text == tiny_target.text.decode(row.answer_ids)
        assert row.split == split_of(row.key, 0.3)
    assert {row.split for row in rows} == {"train", "heldout"}


def test_answers_do_not_depend_on_the_batches(tiny_target, tmp_path):
    sampled = RegenerationSettings(max_new_tokens=15, temperature=1.0, seed=4, batch_size=5)
    other = RegenerationSettings(max_new_tokens=15, temperature=1.0, seed=4, batch_size=14)
    first = {row.key: row.answer_ids for row in run(tiny_target, tmp_path / "a", settings=sampled).rows()}
    again = {row.key: row.answer_ids for row in run(tiny_target, tmp_path / "b", settings=other).rows()}
    assert first == again


@pytest.mark.parametrize("temperature", [float("inf"), float("nan")])
def test_a_temperature_that_is_none_leaves_nothing(temperature, tiny_target, tmp_path):
    settings = RegenerationSettings(max_new_tokens=15, temperature=temperature)
    with pytest.raises(InputError, match="temperature must be a finite number"):
        run(tiny_target, tmp_path / "data", settings=settings)
    assert not (tmp_path / "data").exists()


def test_turns_are_answered_in_turn(tiny_target, tmp_path):
    prompt = Prompt(("Ana has 3 coins.", "Ben has 4 coins."))
    rows = list(run(tiny_target, tmp_path / "data", [prompt]).rows())
    assert [row.turn for row in rows] == [0, 1]
    assert rows[1].prompt_ids == tiny_target.text.encode_chat(prompt.turns[0], rows[0].text, prompt.turns[1])


def test_a_conversation_that_outgrows_the_target_ends(tiny_target, tmp_path, monkeypatch):
    first = len(tiny_target.text.encode_chat("Ana has 3 coins."))
    monkeypatch.setattr(tiny_target, "max_positions", first + 40)
    prompts = [Prompt(("Ana has 3 coins.", "Ben " * 10, "Cho has 5.")), Prompt(("Dee has 4 coins.",))]
    rows = list(run(tiny_target, tmp_path / "data", prompts).rows())
    found = {(row.turn, bool(row.answer_ids), row.stop_reason == "position_limit") for row in rows}
    assert found == {(0, True, False), (1, False, True), (2, False, True)}
    assert AnswerStore(tmp_path / "data").manifest()["rows"] == len(rows) == 4
    # What has no answer is no fault of the data.
    corpus = Corpus.read([tmp_path / "data"], tiny_target.digest(), first + 30, 5)
    assert len(corpus.train) + len(corpus.heldout) == 2


def test_line_ends_within_an_answer_are_its_own(tmp_path):
    store = AnswerStore(tmp_path)
    store.open({})
    texts = ["a\u2028b\u2029c", "d\x85e\x0bf\x1cg", "h\r\ni\n"]
    rows = [AnswerRow(f"{number:016x}", 0, "train", [1], [2], text, "") for number, text in enumerate(texts)]
    store.write(0, rows)
    assert list(store.rows()) == rows


class Stopped(Exception):
    """Stands for a run that ends in the middle."""


@pytest.mark.parametrize("after", range(1, 60, 9))
def test_a_stopped_run_goes_on_where_it_was(tiny_target, tmp_path, after):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(tiny_target, whole)
    calls = 0

    def stop(progress):
        nonlocal calls
        calls += 1
        if calls == after:
            raise Stopped

    with pytest.raises(Stopped):
        run(tiny_target, broken, on_progress=stop)
    before = contents(broken)
    run(tiny_target, broken)
    assert contents(broken) == contents(whole)
    assert before.items() <= contents(broken).items()


@pytest.mark.parametrize("damage", ["cut between lines", "a digit", "gone", "no sum"])
def test_what_is_damaged_is_made_again(tiny_target, tmp_path, damage):
    """And never counted as an answer: ten of twelve were once called complete."""
    run(tiny_target, tmp_path)
    whole, path, sums = contents(tmp_path), tmp_path / "answers-00001.jsonl", tmp_path / "SHA256SUMS"
    lines = path.read_text().splitlines(keepends=True)
    match damage:
        case "cut between lines":
            path.write_text("".join(lines[:-1]))
        case "a digit":
            path.write_text("".join(lines).replace('"answer_ids": [', '"answer_ids": [1', 1))
        case "gone":
            path.unlink()
        case _:
            sums.write_text(
                "".join(line for line in sums.read_text().splitlines(True) if path.name not in line)
            )
    written = []
    run(tiny_target, tmp_path, on_progress=lambda progress: written.append(progress.tokens))
    assert contents(tmp_path) == whole
    assert 0 < written[-1] < sum(len(row.answer_ids) for row in AnswerStore(tmp_path).rows())


def test_other_settings_are_refused(tiny_target, tmp_path):
    run(tiny_target, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError) as error:
        run(
            tiny_target,
            tmp_path,
            PROMPTS[:3],
            RegenerationSettings(max_new_tokens=9, heldout=0.3, batch_size=4),
        )
    assert "max_new_tokens: expected 20 as before, found 9" in str(error.value)
    assert "prompts: expected" in str(error.value)
    assert contents(tmp_path) == before


def test_another_target_is_refused(tiny_target, tmp_path):
    run(tiny_target, tmp_path)
    weight = tiny_target.model.get_output_embeddings().weight
    kept = weight.detach().clone()
    try:
        weight.data += 1
        with pytest.raises(InputError, match="target: expected"):
            run(tiny_target, tmp_path)
    finally:
        weight.data.copy_(kept)


def test_a_full_disk_loses_nothing(tiny_target, tmp_path, monkeypatch):
    calls = 0

    def full(number):
        nonlocal calls
        calls += 1
        if calls == 6:  # of the manifest and its sum, two each of the batches
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
        run(tiny_target, tmp_path)
    assert list(contents(tmp_path)) == ["dataset.json", "answers-00000.jsonl", "answers-00001.jsonl"]
    monkeypatch.undo()
    assert len(list(run(tiny_target, tmp_path).rows())) == len(PROMPTS)


def test_a_prompt_longer_than_the_target(tiny_target, tmp_path):
    with pytest.raises(InputError, match=r"prompts too long for the target: 'aaaa.* has 1501 tokens"):
        run(tiny_target, tmp_path / "data", [*PROMPTS, Prompt(("a" * 1500,))])
    assert not (tmp_path / "data").exists()


def test_a_folder_that_is_no_data_directory(tmp_path):
    with pytest.raises(
        InputError, match=r"expected a folder made by treeflash regenerate, found no dataset\.json"
    ):
        AnswerStore(tmp_path).manifest()


def test_split_is_a_function_of_the_prompt():
    keys = [Prompt((str(number),)).key for number in range(4000)]
    held = sum(split_of(key, 0.1) == "heldout" for key in keys)
    assert held == pytest.approx(400, abs=80)
    assert {split_of(key, 0.0) for key in keys} == {"train"}
    assert {split_of(key, 1.0) for key in keys} == {"heldout"}


def test_command_line_mistakes(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("")
    words = ["regenerate", "tiny-plain", "--prompts", str(file), "--out", str(tmp_path / "data")]
    result = CliRunner().invoke(commands, words)
    assert "expected at least one prompt, found none" in str(result.exception)
    assert not (tmp_path / "data").exists()


def test_read_from_the_shipped_forms(tmp_path):
    rows = [
        {"question": "Q", "answer": "A"},
        {"prompt": "P", "task_id": "x"},
        {"text": "T", "code": "c"},
        {"question_id": 1, "turns": ["A", "B"]},
        {"prompt": "P"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert [prompt.turns for prompt in read_prompts(file)] == [("Q",), ("P",), ("T",), ("A", "B")]
    assert len(read_prompts(file, limit=2)) == 2
    # As MBPP's sanitized form comes, and HumanEval.
    array, packed = tmp_path / "prompts.json", tmp_path / "prompts.jsonl.gz"
    array.write_text(json.dumps(rows, indent=1))
    packed.write_bytes(gzip.compress(file.read_bytes()))
    for other in (array, packed):
        assert read_prompts(other) == read_prompts(file)
        assert len(read_prompts(other, limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", b'[{"prompt": "P"}', "not valid JSON"),
        ("a.json", b'[{"prompt": "P"}, 3]', "element 2: expected a JSON object, found int"),
        ("a.json", b"[]", "expected at least one prompt, found none"),
        (
            "a.jsonl",
            b'{"prompt": "P"}\n\n{"prompt": "\xff"}',
            r"line 3 is not UTF-8 \(byte 0xff at column 13\)",
        ),
        ("a.gz", gzip.compress(b'{"prompt": "P"}\n\xff'), r"line 2 is not UTF-8 \(byte 0xff at column 1\)"),
        ("a.jsonl", b"", "expected at least one prompt, found none"),
        ("a.gz", gzip.compress(b'{"prompt": "P"}' * 99, mtime=0)[:-9], "not whole"),
        ("a.gz", b'{"prompt": "P"}', "cannot be read"),
    ],
    ids=[
        "cut off",
        "a number",
        "empty array",
        "no text",
        "no text and compressed",
        "empty",
        "cut off and compressed",
        "not compressed",
    ],
)
def test_files_at_fault(tmp_path, name, content, fault):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=fault):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 2: not valid JSON"),
        ("[1]", "line 2: expected a JSON object, found list"),
        ('{"a": 1}', "line 2: expected one of the keys turns, prompt, question, problem, text, found a"),
        ('{"prompt": ""}', "line 2: prompt: expected text, found ''"),
        ('{"prompt": 3}', "line 2: prompt: expected text, found 3"),
        ('{"turns": []}', r"line 2: turns: expected text, found \[\]"),
        ('{"turns": ["a", null]}', "line 2: turns: expected text"),
        (r'{"prompt": "a \ud83d b"}', "line 2: prompt: expected text, found half of a surrogate pair in 'a "),
    ],
)
def test_rows_without_text_are_faults(tmp_path, line, fault):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match=fault):
        read_prompts(file)


def test_a_missing_file_and_many_faults(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}\n" * 50)
    with pytest.raises(InputError, match="and 30 more"):
        read_prompts(file)
