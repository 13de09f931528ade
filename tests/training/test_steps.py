"""What a step is: the gradient of a mean over what its texts are asked, and every setting in its place."""

import json

import pytest
import torch
from safetensors.torch import load_file

from treeflash.places import locate
from treeflash.recipe import open_target
from treeflash.trainable import TrainContext
from treeflash.training.corpus import Corpus
from treeflash.training.draws import batch_of, question_generator, weights_generator
from treeflash.training.states import ComputedStates
from treeflash.training.texts import pack

CHECKPOINT = {"use": "dflash", "checkpoint": "treeflash.testing:models/tiny-dflash", "anchors": 4}


def steps(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def weights(out):
    return load_file(out / "drafter" / "model.safetensors")


def trainable_of(recipe, target):
    context = TrainContext(
        target=target,
        locate=locate,
        loss=recipe.loss.from_options(recipe.loss_options, None),
        columns=None,
        frequent=torch.arange,
        refiner=recipe.refiner,
        refiner_options=recipe.refiner_options,
        dtype=torch.float32,
        generator=weights_generator(recipe.train.seed),
    )
    return recipe.trainable.from_options(recipe.trainable_options, context)


def test_a_step_by_hand(run, small, registry, data, write_data, cpu_target, tmp_path):
    """At a rate that changes nothing, so that each step is computed from the first weights."""
    recipe = small(
        data={"batch_size": 3, "length": 64}, optimizer={"lr": 1e-12}, train={"seed": 5, "steps": 4}
    )
    rows = [("train", [2, 65, 66], list(b"coins and " * number)) for number in (1, 2, 3, 5)]
    digest = cpu_target.digest()
    data = write_data(tmp_path / "data", digest, [*rows, ("heldout", [2, 65], list(b"coins"))])
    told = steps(run(tmp_path / "out", recipe, [data]))
    trainable = trainable_of(recipe, open_target(recipe.target, registry))
    corpus = Corpus.read([data], digest, 64, 2)
    states = ComputedStates(trainable.target, trainable.tap_layers)
    for step, line in enumerate(told):
        total, weight, positions = torch.zeros(()), 0.0, 0
        for epoch, number in batch_of(step, 3, 4, seed=5):
            row = pack([corpus.train[number]])
            task = trainable.ask(row, [question_generator(5, epoch, number)])
            total = total + trainable(task, states.read([number], row))
            weight, positions = weight + task.weight, positions + task.positions
        trainable.zero_grad()
        (total / weight).backward()
        gradients = [part.grad for part in trainable.parameters() if part.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert line["loss"] == pytest.approx(float(total.detach()) / weight, rel=1e-4)
        assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        assert line["positions"] == positions
    assert len({line["loss"] for line in told}) == 4


SETTINGS = [
    ("train", "seed", 1),
    ("train", "average", 0.5),
    ("optimizer", "lr", 1e-3),
    ("optimizer", "warmup", 0.7),
    ("optimizer", "weight_decay", 0.1),
    ("optimizer", "beta1", 0.5),
    ("optimizer", "beta2", 0.5),
    ("optimizer", "clip", 1e9),
    ("loss", "shortlist", 30),
    ("drafter", "anchors", 5),
    ("drafter", "decay", 1.0),
    ("drafter", "backbone_weight", 0.5),
    ("drafter", "block_size", 5),
    ("data", "batch_size", 5),
]


@pytest.fixture(scope="module")
def plain(run, tmp_path_factory):
    return weights(run(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize(("table", "key", "value"), SETTINGS)
def test_every_setting_counts(run, plain, tmp_path, table, key, value):
    changed = weights(run(tmp_path, **{table: {key: value}}))
    assert any(not torch.equal(changed[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [("train", "evaluate_every", 1), ("train", "save_every", 1), ("train", "keep", 1)],
)
def test_looking_changes_nothing(run, plain, tmp_path, table, key, value):
    changed = weights(run(tmp_path, **{table: {key: value}}))
    assert all(torch.equal(changed[name], plain[name]) for name in plain)


def test_decay_is_of_matrices_at_the_rate_of_the_step(run, variant, models, tmp_path):
    """The first of two steps that rise: half the highest rate."""

    def after_one(name, decay):
        recipe = variant(
            tmp_path,
            drafter=CHECKPOINT,
            optimizer={"lr": 0.01, "warmup": 1.0, "weight_decay": decay},
            train={"steps": 2, "save_every": 1},
        )
        out = run(tmp_path / name, recipe)
        assert [line["lr"] for line in steps(out)] == [0.005, 0.01]
        return load_file(out / "checkpoints" / "step-00000001" / "weights.safetensors")

    before = load_file(models / "tiny-dflash" / "model.safetensors")
    plain, decayed = after_one("plain", 0.0), after_one("decayed", 0.1)
    for name, weight in plain.items():
        if weight.ndim < 2:
            assert torch.equal(decayed[name], weight)
        elif name.startswith("network."):
            first = before[name.removeprefix("network.")]
            assert torch.allclose(weight - decayed[name], 0.005 * 0.1 * first, rtol=0, atol=1e-6)
            assert not torch.equal(weight, decayed[name])


def test_the_average_is_the_mean_of_its_steps(run, tmp_path):
    out = run(tmp_path, train={"steps": 3, "save_every": 1, "keep": 9, "average": 0.5})
    kept = [
        [load_file(folder / f"{name}.safetensors") for name in ("weights", "average")]
        for folder in sorted((out / "checkpoints").iterdir())
    ]
    for step in (1, 2):
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in kept[step][0].items():
            expected = decay * kept[step - 1][1][name] + (1 - decay) * value
            assert torch.allclose(kept[step][1][name], expected, atol=1e-6)
    shipped = weights(out)
    averaged = {name.removeprefix("network."): value for name, value in kept[-1][1].items()}
    assert all(torch.equal(shipped[name], averaged[name]) for name in shipped if name in averaged)
    assert sum(name in averaged for name in shipped) > 5
