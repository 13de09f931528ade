"""From a training recipe to a drafter: one text learned by heart, an interrupted run, a file read again."""

import json

import pytest
import torch
from safetensors.torch import load_file
from treeflash_eagle3.drafter import Eagle3

import treeflash
from treeflash.engine import Decoder
from treeflash.errors import InputError
from treeflash.plugins import Registry
from treeflash.recipe_tables import merge
from treeflash.training import session
from treeflash.training.answers import AnswerRow, AnswerStore
from treeflash.training.metrics import read_metrics
from treeflash.training.session import Listener
from treeflash.training.training_recipe import TrainingRecipe

UNROLL = 7
# The first token comes from reading the prompt, the others in whole steps.
TOKENS = 1 + 7 * (UNROLL + 1)
TOLD = {"max_new_tokens": TOKENS, "stop_ids": ()}


@pytest.fixture(scope="module")
def written(tiny_target):
    """A prompt and what the target writes behind it."""
    prompt = tiny_target.text.encode_chat("Ana has 7 coins. Ana")
    return prompt, list(Decoder(tiny_target).generate(prompt, **TOLD).token_ids)


@pytest.fixture(scope="module")
def data(tiny_target, written, tmp_path_factory):
    """A data directory of that text alone, which is held out too."""
    folder = tmp_path_factory.mktemp("answers") / "data"
    store = AnswerStore(folder)
    store.open({"target": tiny_target.digest(), "rows": 2})
    rows = [
        AnswerRow(f"{number:016x}", 0, split, *written, "", "max_new_tokens")
        for number, split in enumerate(("train", "heldout"))
    ]
    store.write(0, rows)
    return folder


@pytest.fixture
def run(data):
    def run(out, listener=None, data=data, **tables):
        registry = Registry.load()
        small = {"target": {"device": "cpu"}, "data": {"batch_size": 1, "states": "compute"}}
        recipe = TrainingRecipe.load("tiny-eagle3-train", registry, merge(small, tables))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "draw", lambda *_: None)  # it takes longer than the training
            session.train(recipe, registry, [data], out, listener)
        return out / "drafter"

    return run


@pytest.mark.slow
def test_learned_by_heart(run, written, tmp_path):
    prompt, answer = written
    folder = run(
        tmp_path / "out",
        drafter={"draft_vocab_size": 40, "intermediate_size": 64},
        optimizer={"lr": 5e-3},
        train={"steps": 200},
    )
    (measured,) = json.loads((folder / "training.json").read_text())["heldout"].values()
    assert len(measured["top1"]) == UNROLL
    assert min(measured["top1"]) > 0.98
    # A chain ends with the text, so that the last ones are short.
    longest = sum(min(UNROLL + 1, left) for left in range(1, TOKENS + 1)) / TOKENS
    assert measured["block_efficiency"] > 0.99 * longest
    # Where the target itself hesitates, a tree takes in both ways, and is less deep by that.
    for selector, least in (({"use": "opt-tree", "budget": 15, "beam": 10}, 0.85), ({"use": "chain"}, 0.95)):
        decoder = treeflash.load(folder / "recipe.toml", selector=selector)
        found = decoder.generate(prompt, **TOLD)
        assert list(found.token_ids) == answer
        assert found.statistics.block_efficiency > least * (UNROLL + 1)


class Stopped(Exception):
    """Stands for a run that ends in the middle."""


def test_a_run_that_goes_on_ends_with_the_same_head(run, tmp_path):
    told = {"train": {"steps": 4, "save_every": 2, "average": 0.5}, "drafter": {"draft_vocab_size": 40}}

    def stop(progress):
        if progress.step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path / "broken", Listener(on_progress=stop), **told)
    found, expected = (run(tmp_path / name, **told) for name in ("broken", "whole"))
    tensors, theirs = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())


def test_what_is_written_is_the_public_layout(run, files, written, tmp_path, tiny_target):
    folder = run(tmp_path / "out", train={"steps": 1}, drafter={"draft_vocab_size": 20, "children": 4})
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == files.tensors.keys()
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert kinds.pop("d2t") == torch.int64
    assert kinds.pop("t2d") == torch.bool
    assert set(kinds.values()) == {torch.float32}
    config = json.loads((folder / "config.json").read_text())
    assert {**files.config, **config}.keys() == files.config.keys()
    assert (config["draft_vocab_size"], config["vocab_size"]) == (20, 128)
    drafted = set((torch.arange(20) + tensors["d2t"]).tolist())
    frequent = sorted(set(written[1]), key=written[1].count, reverse=True)
    assert drafted >= set(frequent[:10])
    drafter = treeflash.load(folder / "recipe.toml").drafter
    assert isinstance(drafter, Eagle3)
    assert (drafter.children, drafter.max_depth) == (4, UNROLL)


def answers(folder, target, *texts):
    """A data directory of texts to train on, and the last of them held out."""
    store = AnswerStore(folder)
    store.open({"target": target.digest(), "rows": len(texts) + 1})
    splits = ["train"] * len(texts) + ["heldout"]
    store.write(
        0,
        [
            AnswerRow(f"{number:016x}", 0, split, prompt, answer, "", "max_new_tokens")
            for number, (split, (prompt, answer)) in enumerate(zip(splits, [*texts, texts[-1]], strict=True))
        ],
    )
    return folder


def test_texts_too_short_to_learn_from_are_refused(run, tiny_target, tmp_path):
    data = answers(tmp_path / "data", tiny_target, ([5], [6]), ([7], [8]))
    with pytest.raises(
        InputError, match=r"data: nothing to learn from for Eagle3Trainable: none of the 2 texts"
    ):
        run(tmp_path / "out", data=data, train={"steps": 2})
    assert not (tmp_path / "out").exists()


def test_steps_that_ask_nothing_change_nothing(run, written, tiny_target, tmp_path):
    data = answers(tmp_path / "data", tiny_target, ([5], [6]), written)
    run(tmp_path / "out", data=data, train={"steps": 4})
    lines = [line for line in read_metrics(tmp_path / "out") if "loss" in line]
    # A text a step, each once an epoch.
    assert sorted(line["positions"] > 0 for line in lines) == [False, False, True, True]
    assert all((line["loss"] > 0) == (line["positions"] > 0) for line in lines)
