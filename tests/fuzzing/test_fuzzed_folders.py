"""Damaged folders of long runs: a run makes of one what it would have made, or says what is wrong."""

import json
import shutil

import attrs
import pytest

from treeflash.evaluation.bench import RUNS, PromptRuns, read_runs
from treeflash.evaluation.counts import Run, TreeCounts
from treeflash.evaluation.evaluate import read_results, write_results
from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.training import session
from treeflash.training.corpus import Corpus
from treeflash.training.decoding_check import DecodingCheck
from treeflash.training.regeneration import RegenerationSettings, regenerate
from treeflash.training.session import Listener
from treeflash.training.states import CachedStates, ComputedStates
from treeflash.training.texts import pack
from treeflash.training.training_recipe import TrainingRecipe

from .cases import try_all
from .mutations import mutated_bytes, mutated_value

SETTINGS = RegenerationSettings(max_new_tokens=6, heldout=0.4, batch_size=2)
PROMPTS = [Prompt((f"{name} has {count} coins.",)) for name in ("Ana", "Ben", "Cho") for count in (3, 5)]
TABLES = {
    "target": {"device": "cpu"},
    "drafter": {"block_size": 3, "layers": 1, "intermediate_size": 8, "anchors": 2},
    "data": {"batch_size": 1, "heldout_texts": 1},
    "train": {"steps": 3, "evaluate_every": 1000, "save_every": 1, "average": 0.5},
}


def damage(folder, chance):
    """Damages one thing in a folder; gives the path."""
    path = chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    data = path.read_bytes()
    match chance.randrange(8):
        case 0:
            path.unlink()
        case 1:
            lines = data.splitlines(keepends=True)
            path.write_bytes(b"".join(lines[: chance.randrange(len(lines) + 1)]))
        case 2:
            path.write_bytes(
                chance.choice(sorted(path.parent.iterdir())).read_bytes() if path.parent != folder else b""
            )
        case 3:
            path.unlink()
            path.mkdir()
        case 4 if path.suffix in (".json", ".jsonl"):
            lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
            place = chance.randrange(len(lines))
            lines[place] = json.dumps(mutated_value(json.loads(lines[place]), chance))
            path.write_text("\n".join(lines) + "\n")
        case 5 if data:
            place = chance.randrange(len(data))
            path.write_bytes(
                data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
            )
        case 6:
            made = path.parent / chance.choice(
                ("step-abc", "step-00000001x", "answers-abc.jsonl", ".x.partial")
            )
            made.mkdir(exist_ok=True)
        case _:
            path.write_bytes(mutated_bytes(data, chance))
    return path


@pytest.fixture(scope="module")
def target(tiny_targets):
    return tiny_targets["cpu"]


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return regenerate(target, "tiny", PROMPTS, tmp_path_factory.mktemp("data") / "data", SETTINGS).folder


def corpus(folder, target):
    return Corpus.read([folder], target.digest(), 512, 8)


def answers(folder):
    written = {path.name: path.read_bytes() for path in sorted(folder.glob("answers-0*.jsonl"))}
    return json.loads((folder / "dataset.json").read_text()), written


def test_data_read(data, target, tmp_path, fuzz_cases):
    expected = corpus(data, target).fingerprint

    def attempt(case, chance):
        folder = shutil.copytree(data, tmp_path / f"case-{case}")
        if chance.random() < 0.5:
            (folder / "tokens.safetensors").unlink()
        damage(folder, chance)
        assert corpus(folder, target).fingerprint == expected

    try_all(fuzz_cases, attempt, named="case-{case}")


def test_data_made_again(data, target, tmp_path, fuzz_cases):
    expected = answers(data)

    def attempt(case, chance):
        folder = shutil.copytree(data, tmp_path / f"case-{case}")
        damage(folder, chance)
        regenerate(target, "tiny", PROMPTS, folder, SETTINGS)
        assert answers(folder) == expected
        assert corpus(folder, target).fingerprint == corpus(data, target).fingerprint

    try_all(max(8, fuzz_cases // 4), attempt, named="case-{case}")


def test_states(data, target, tmp_path, fuzz_cases):
    texts = corpus(data, target).texts
    row = pack(texts)

    def made(folder):
        return CachedStates(ComputedStates(target, (0, 2)), folder, texts)

    whole = made(tmp_path / "whole")
    list(whole.fill())
    expected = whole.read(range(len(texts)), row)

    def attempt(case, chance):
        folder = shutil.copytree(whole.folder, tmp_path / f"case-{case}")
        if chance.random() < 0.8:
            damage(folder, chance)
        states = made(folder)
        list(states.fill())
        found = states.read(range(len(texts)), row)
        states.close()
        assert found.taps.equal(expected.taps)
        assert found.normed.equal(expected.normed)

    try_all(fuzz_cases, attempt, named="case-{case}")


def test_runs(data, target, tmp_path, fuzz_cases, monkeypatch):
    """Resumed from step 2 of 3."""
    monkeypatch.setattr(session, "draw", lambda *_: None)
    monkeypatch.setattr(session, "open_target", lambda *_: target)
    monkeypatch.setattr(session, "check_decoding", lambda *_: DecodingCheck(1.0, 1.0, 1))
    registry = Registry.load()
    recipe = TrainingRecipe.load("tiny-train", registry, TABLES)

    class Stopped(Exception):
        pass

    def stop(progress):
        if progress.step == 2:
            raise Stopped

    def train(out, listener=None):
        session.train(recipe, registry, [data], out, listener)
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        record = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        adjusted = json.loads((out / "adjusted.json").read_text())
        return (out / "drafter" / "model.safetensors").read_bytes(), record, adjusted

    begun = tmp_path / "begun"
    with pytest.raises(Stopped):
        train(begun, Listener(on_progress=stop))
    expected = train(shutil.copytree(begun, tmp_path / "whole"))

    def attempt(case, chance):
        folder = shutil.copytree(begun, tmp_path / f"case-{case}")
        damaged = damage(folder, chance)
        told = []
        weights, record, adjusted = train(folder, Listener(say=told.append))
        assert weights == expected[0]
        if damaged.name == "metrics.jsonl" and any("is gone" in sentence for sentence in told):
            return
        assert (record, adjusted) == expected[1:]

    try_all(max(8, fuzz_cases // 4), attempt, named="case-{case}")


def test_measurements(tmp_path, fuzz_cases):
    told = Run(
        "plain",
        0,
        3,
        [4, 5],
        "stop_token",
        0.1,
        0.25,
        [1],
        [0],
        [2],
        [1],
        {"draft": 0.5},
        TreeCounts(),
        None,
        "identical",
    )
    lines = [
        PromptRuns("small", index, "0" * 16, [told, attrs.evolve(told, arm="tree")]) for index in range(3)
    ]
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / RUNS).write_text("".join(line.to_json() + "\n" for line in lines))
    results = {"texts": 3, "arms": {"tree": {"block_efficiency": 2.5, "by_budget": {"4": 1.5}}}}
    write_results(whole, results)

    def attempt(case, chance):
        folder = shutil.copytree(whole, tmp_path / f"case-{case}")
        damage(folder, chance)
        # Those that are missing are measured again.
        assert all(line in lines for line in read_runs(folder))
        assert read_results(folder) == results

    try_all(fuzz_cases, attempt, named="case-{case}")
