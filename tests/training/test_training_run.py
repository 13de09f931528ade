"""Runs from recipe and data to a drafter: what they learn, what they write, how they end."""

import itertools
import json
import math

import attrs
import pytest
import torch
from safetensors.torch import load_file

import treeflash
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.engine import Decoder
from treeflash.errors import TrainingError, TreeflashError
from treeflash.trainable import Loss
from treeflash.training import plots, session
from treeflash.training.answers import AnswerStore
from treeflash.training.corpus import Corpus
from treeflash.training.measuring import HeldOut
from treeflash.training.metrics import Metrics
from treeflash.training.schedule import Watch
from treeflash.training.session import Listener
from treeflash.training.states import CachedStates

REFINERS = ["swiglu", "two-token", "linear", "bilinear", "none"]
FEW = {"steps": 2, "evaluate_every": 1000, "save_every": 1000}
TINY_DFLASH = "treeflash.testing:models/tiny-dflash"


def weights(out):
    return load_file(out / "drafter" / "model.safetensors")


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def record(out):
    return json.loads((out / "drafter" / "training.json").read_text())


@pytest.fixture(scope="module")
def heldout(data):
    return [row.prompt_ids for row in AnswerStore(data).rows("heldout")][:2]


@pytest.fixture
def decodes(cpu_target, heldout):
    """Makes sure that a shipped drafter decodes as the target alone would."""
    alone = Decoder(cpu_target)

    def decodes(out):
        decoder = treeflash.load(out / "drafter" / "recipe.toml")
        for prompt in heldout:
            expected = alone.generate(prompt, max_new_tokens=20).token_ids
            found = decoder.generate(prompt, max_new_tokens=20)
            assert found.token_ids == expected
            assert found.statistics.steps[0].num_drafted > 0

    return decodes


@pytest.mark.parametrize("refiner", REFINERS)
def test_every_refiner(run, decodes, tmp_path, refiner):
    out = run(tmp_path, refiner={"use": refiner}, train=FEW)
    names = ["backbone"] if refiner == "none" else ["backbone", "refined"]
    assert list(record(out)["heldout"]) == names
    decodes(out)


def test_no_refiner(run, variant, decodes, tmp_path):
    out = run(tmp_path / "out", variant(tmp_path, refiner=None))
    assert list(record(out)["heldout"]) == ["backbone"]
    decodes(out)


@pytest.mark.parametrize("loss", ["forward-kl", "cross-entropy", "total-variation"])
def test_every_loss(run, decodes, tmp_path, loss):
    decodes(run(tmp_path, loss={"use": loss, "shortlist": 40}, train=FEW))
    first, second = (line["loss"] for line in lines(tmp_path) if "loss" in line)
    assert 0 < first
    assert 0 < second


@pytest.mark.parametrize(
    "drafter",
    [
        {"previous": "tree", "tree_budget": 6},
        {"backbone_weight": 0.0},
        {"decay": 0.0, "target_layer_ids": [3]},
    ],
)
def test_ways_to_teach(run, decodes, tmp_path, drafter):
    plain = run(tmp_path / "plain", train=FEW)
    out = run(tmp_path / "out", drafter=drafter, train=FEW)
    assert lines(out)[1]["loss"] != lines(plain)[1]["loss"]
    decodes(out)


def test_start_from_the_target(run, variant, decodes, cpu_target, tmp_path):
    drafter = {"use": "dflash", "block_size": 4, "layers": 2, "mask_token_id": 1, "start": "target"}
    slow = {"lr": 1e-12}
    out = run(tmp_path / "out", variant(tmp_path, drafter=drafter, optimizer=slow))
    copied = weights(out)["layers.1.mlp.up_proj.weight"]
    assert torch.allclose(copied, list(cpu_target.layers)[-1].mlp.up_proj.weight, atol=1e-6)
    decodes(out)


@pytest.mark.parametrize("refiner", REFINERS[:-1])
def test_a_fresh_refiner_changes_nothing(run, variant, heldout, tmp_path, refiner):
    recipe = variant(
        tmp_path,
        drafter={"use": "dflash", "checkpoint": TINY_DFLASH, "frozen": True, "anchors": 4},
        refiner={"use": refiner},
        optimizer={"lr": 1e-12},
        train={"steps": 1},
    )
    out = run(tmp_path / "out", recipe)
    shipped = out / "drafter" / "recipe.toml"
    refined, own = treeflash.load(shipped), treeflash.load(shipped, refiner={"use": "none"})
    for prompt in heldout:
        mine, theirs = (decoder.generate(prompt, max_new_tokens=40) for decoder in (refined, own))
        assert mine.token_ids == theirs.token_ids
        accepted = [step.num_accepted for step in mine.statistics.steps]
        assert accepted == [step.num_accepted for step in theirs.statistics.steps]
        assert max(accepted) > 1
    measured = record(out)["heldout"]
    assert measured["refined"] == measured["backbone"]


def test_a_frozen_backbone_stays(run, variant, models, tmp_path):
    drafter = {"use": "dflash", "checkpoint": TINY_DFLASH, "frozen": True, "anchors": 4}
    out = run(tmp_path / "out", variant(tmp_path, drafter=drafter))
    before = load_file(models / "tiny-dflash" / "model.safetensors")
    after = weights(out)
    assert before.keys() < after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    own = [after[name] for name in after if name not in before]
    assert record(out)["trained_parameters"] == sum(weight.numel() for weight in own)
    assert all(weight.abs().max() > 0 for weight in own)


def test_training_goes_on_from_a_shipped_drafter(run, variant, tmp_path):
    first = run(tmp_path / "first", train={**FEW, "average": 0.5})
    shipped = str(first / "drafter")
    again = variant(
        tmp_path,
        drafter={"use": "dflash", "checkpoint": shipped, "anchors": 4},
        refiner={"use": "swiglu", "checkpoint": shipped},
    )
    second = run(tmp_path / "second", again)
    assert lines(second)[0]["heldout"] == lines(first)[-1]["heldout"]


def test_cached_states_teach_the_same(run, tmp_path):
    computed = run(tmp_path / "computed", data={"states": "compute"})
    cached = run(tmp_path / "cached", data={"states": "cache"})
    mine, theirs = weights(computed), weights(cached)
    assert all(torch.allclose(mine[name], theirs[name], rtol=0, atol=1e-5) for name in mine)
    assert list((cached / "states").glob("*.safetensors"))
    assert not (computed / "states").exists()


def test_bfloat16(run, decodes, tmp_path):
    exact = run(tmp_path / "exact")
    out = run(tmp_path / "rough", train={"dtype": "bfloat16", "average": 0.5})
    for name in ("weights", "average", "optimizer"):
        kept = load_file(out / "checkpoints" / "step-00000004" / f"{name}.safetensors")
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    (rough, *_), (fine, *_) = (
        [line["loss"] for line in lines(run) if "loss" in line] for run in (out, exact)
    )
    assert rough != fine
    assert rough == pytest.approx(fine, rel=0.02)
    decodes(out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_in_the_dtype_asked_for(run, small, tmp_path, dtype, monkeypatch):
    seen, plain = set(), ForwardKl.rows

    def rows(self, *arguments):
        seen.add(torch.is_autocast_enabled("cpu"))
        return plain(self, *arguments)

    monkeypatch.setattr(ForwardKl, "rows", rows)
    run(tmp_path, train={**FEW, "dtype": dtype})
    assert seen == {dtype == "bfloat16"}


@attrs.frozen
class Breaking(Loss):
    """Is fine for a while."""

    value: float
    calls = itertools.count()

    def rows(self, draft_logits, target_log_probs, labels):
        plain = draft_logits.logsumexp(dim=-1)
        return plain * self.value if next(self.calls) >= 3 else plain


class Steep(Breaking):
    """Has a value and no gradient."""

    def rows(self, draft_logits, target_log_probs, labels):
        zero = draft_logits - draft_logits.detach()
        return zero.sqrt().sum(dim=-1)


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (Breaking, math.nan, r"step 4: the loss is nan"),
        (Breaking, math.inf, r"step 4: the loss is inf"),
        (Breaking, 1e3, r"step 4: the loss diverges: its mean rose from \S+ to \S+"),
        (Steep, 0.0, "step 1: the norm of the gradient is (nan|inf)"),
    ],
)
def test_a_loss_that_breaks(run, small, tmp_path, kind, value, fault):
    made = kind(value)
    kind.calls = itertools.count()
    plain = small(train={"steps": 8, "save_every": 2}, refiner={"use": "none"})
    recipe = attrs.evolve(plain, loss=type("Made", (), {"from_options": lambda *_: made}), loss_options=None)
    with pytest.raises(TrainingError, match=fault) as error:
        run(tmp_path, recipe)
    kept = tmp_path / "checkpoints" / "step-00000002"
    good = f"the last good checkpoint is {kept}" if kind is Breaking else "none was written yet"
    assert str(error.value).endswith(good)
    assert not (tmp_path / "drafter").exists()
    if kind is Breaking:
        saved = load_file(kept / "weights.safetensors")
        assert all(tensor.isfinite().all() for tensor in saved.values())


def test_what_a_watch_lets_pass():
    watch = Watch()
    assert all(watch.see(3.0 + noise) is None for noise in (0, 2, -1, 1, 2) * 20)
    assert watch.see(-math.inf) is not None
    assert "diverges" in [watch.see(30.0) for _ in range(60)][-1]


def test_a_record_that_cannot_be_written(run, tmp_path):
    def full(progress):
        if progress.step == 1:
            (tmp_path / "metrics.jsonl").unlink()
            (tmp_path / "metrics.jsonl").mkdir()

    with pytest.raises(TreeflashError, match=r"metrics\.jsonl: cannot be written"):
        run(tmp_path, listener=session.Listener(on_progress=full))


def test_what_a_run_writes(registry, small, data, decodes, tmp_path):
    said, steps, states = [], [], []
    listener = session.Listener(said.append, lambda done, total: states.append((done, total)), steps.append)
    tables = {"selector": {"use": "opt-tree", "budget": 9}, "data": {"states": "cache"}}
    recipe = small(train={"tensorboard": True}, loss={"shortlist": 30}, **tables)
    written = session.train(recipe, registry, [data], tmp_path, listener)
    assert written == tmp_path / "drafter" / "recipe.toml"
    files = {path.name for path in (tmp_path / "drafter").iterdir()}
    assert files == {
        "README.md",
        "config.json",
        "model.safetensors",
        "recipe.toml",
        "shortlist.json",
        "training.json",
    }
    assert len(json.loads((tmp_path / "drafter" / "shortlist.json").read_text())["token_ids"]) == 30
    assert {"loss.png", "acceptance.png", "metrics.jsonl", "run.json"} <= set(
        path.name for path in tmp_path.iterdir()
    )
    assert all((tmp_path / name).read_bytes()[:4] == b"\x89PNG" for name in ("loss.png", "acceptance.png"))
    assert [path for path in (tmp_path / "tensorboard").iterdir() if "tfevents" in path.name]
    decodes(tmp_path)
    assert "budget = 9" in written.read_text()
    kept = record(tmp_path)
    assert kept["data"]["texts"] == 34
    assert kept["positions"] == sum(line.get("positions", 0) for line in lines(tmp_path))
    assert kept["heldout"] == lines(tmp_path)[-1]["heldout"]
    assert kept["recipe"]["selector"]["budget"] == 9
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "# A drafter for treeflash.testing:models/tiny-target" in card
    # What the hub reads of a card; a target from a package is no model of its.
    head = "---\nlibrary_name: treeflash\ntags:\n- speculative-decoding\n- dflash\n---\n"
    assert card.startswith(head)
    assert written.read_text().rstrip() in card
    assert f"{kept['heldout']['refined']['block_efficiency']:.2f}" in card
    assert [progress.step for progress in steps] == [1, 2, 3, 4]
    corpus = Corpus.read([data], kept["target"], recipe.data.length, recipe.data.heldout_texts)
    assert states[-1][0] == states[-1][1] == sum(text.length for text in corpus.texts)
    assert any("34 texts to train on, 2 to measure on" in sentence for sentence in said)
    assert any("shortlist of 30 tokens leaves out" in sentence for sentence in said)


def test_a_drafter_that_drafts_less_than_was_simulated_is_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr(HeldOut, "measure_first", lambda self, texts: ([len(self.rows[0][0])], 5.8))
    said: list[str] = []
    run(tmp_path / "out", listener=Listener(say=said.append))
    assert said[-1].startswith("warning: along held-out texts the drafter emits")
    assert "simulated 5.80" in said[-1]


def test_a_target_is_refused_whose_logits_are_not_those_of_its_head(run, tmp_path, monkeypatch):
    def softer(model, arguments, output):
        output.logits = output.logits / 2
        return output

    def opened(*given):
        target = open_target(*given)
        target.model.register_forward_hook(softer)
        return target

    open_target = session.open_target
    monkeypatch.setattr(session, "open_target", opened)
    with pytest.raises(TreeflashError, match="Qwen3ForCausalLM cannot be learned from or compared with"):
        run(tmp_path / "out", train=FEW)
    assert not (tmp_path / "out").exists()


def test_the_drafter_comes_before_the_pictures(registry, small, data, decodes, tmp_path, monkeypatch):
    def full(folder, lines):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "_draw", full)
    fault = rf"the drafter is written to {tmp_path / 'drafter'}: .*: the pictures cannot be written"
    with pytest.raises(TreeflashError, match=fault):
        session.train(small(train=FEW), registry, [data], tmp_path)
    decodes(tmp_path)


def test_a_run_that_fails_leaves_nothing_open(run, tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(CachedStates, "close", lambda self: closed.append("states"))
    monkeypatch.setattr(Metrics, "__exit__", lambda self, *_: closed.append(type(self._events).__name__))

    def stop(progress):
        raise TrainingError("stopped")

    listener = session.Listener(on_progress=stop)
    with pytest.raises(TrainingError, match="stopped"):
        run(tmp_path, listener=listener, train={**FEW, "tensorboard": True}, data={"states": "cache"})
    assert closed == ["SummaryWriter", "states"]
    assert not list(tmp_path.glob(".*"))
