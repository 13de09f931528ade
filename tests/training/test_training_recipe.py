"""Faults of training recipes: all of them, by name, before or as soon as models are looked at."""

import json
import shutil

import pytest

from treeflash.errors import CheckpointError, CompositionError, InputError, RecipeError, UnknownNameError
from treeflash.training.training_recipe import TrainingRecipe

CHECKPOINT = {"use": "dflash", "checkpoint": "treeflash.testing:models/tiny-dflash"}


@pytest.fixture
def faults(registry):
    """The message about tables laid over a recipe."""

    def faults(name="tiny-train", **tables):
        with pytest.raises(RecipeError) as error:
            TrainingRecipe.load(name, registry, tables)
        return str(error.value)

    return faults


def test_the_shipped_one(registry):
    recipe = TrainingRecipe.load("tiny-train", registry)
    assert (recipe.train.steps, recipe.data.batch_size, recipe.optimizer.lr) == (300, 8, 2e-3)
    assert recipe.trainable_options.block_size == 8
    assert recipe.decoding_tables() == {
        "target": {"model": "treeflash.testing:models/tiny-target"},
        "drafter": {"use": "dflash"},
        "refiner": {"use": "swiglu"},
    }


def test_every_fault_is_in_the_one_message(faults):
    message = faults(
        optimiser={"lr": 1.0},
        train={"step": 3, "seed": -1},
        drafter={"block_size": 1, "layer": 2},
        refiner={"use": "swigl"},
        loss={"use": "forward"},
        data={"length": "long"},
    )
    for fault in (
        "unknown table [optimiser]; did you mean 'optimizer'?",
        "train.step: unknown key; did you mean 'steps'?",
        "train.seed: expected >= 0, found -1",
        "drafter.block_size: expected >= 2, found 1",
        "drafter.layer: unknown key; did you mean 'layers'?",
        "refiner.use: no refiner is called 'swigl'; did you mean 'swiglu'?",
        "loss.use: no loss is called 'forward'; did you mean 'forward-kl'?",
        "data.length: expected an integer, found 'long'",
    ):
        assert fault in message
    assert " overridden): 8 faults" in message


@pytest.mark.parametrize(
    ("table", "key", "value", "expected"),
    [
        ("train", "steps", 0, ">= 1"),
        ("train", "dtype", "float16", "float32"),
        ("train", "average", 1.0, "< 1"),
        ("train", "average", -0.1, ">= 0"),
        ("train", "evaluate_every", 0, ">= 1"),
        ("train", "save_every", 0, ">= 1"),
        ("train", "keep", 0, ">= 1"),
        ("train", "shard", 1, "true or false"),
        ("data", "batch_size", 0, ">= 1"),
        ("data", "length", 7, ">= 8"),
        ("data", "states", "disk", "compute"),
        ("data", "heldout_texts", 0, ">= 1"),
        ("optimizer", "lr", 0, "> 0"),
        ("optimizer", "warmup", 1.5, "<= 1"),
        ("optimizer", "weight_decay", -1, ">= 0"),
        ("optimizer", "beta1", 1, "< 1"),
        ("optimizer", "beta2", 1.0, "< 1"),
        ("optimizer", "clip", 0, "> 0"),
        ("loss", "shortlist", -1, ">= 0"),
        ("drafter", "anchors", 0, ">= 1"),
        ("drafter", "previous", "forest", "text"),
        ("drafter", "start", "here", "scratch"),
        ("drafter", "layers", 0, ">= 1"),
        ("drafter", "mask_token_id", -1, ">= 0"),
        ("drafter", "target_layer_ids", 3, "a list"),
        ("refiner", "chekpoint", "a", "did you mean 'checkpoint'"),
        ("target", "device", 3, "a string"),
    ],
)
def test_values_out_of_range(faults, table, key, value, expected):
    message = faults(**{table: {key: value}})
    assert f"tiny-train.toml ({table}.{key} overridden): {table}.{key}: " in message
    assert expected in message


def test_a_recipe_that_decodes(faults):
    message = faults("tiny-treeflash")
    assert "[train]: expected a table with a key steps: this recipe decodes, it does not train" in message


@pytest.mark.parametrize("table", ["target", "drafter", "train", "loss"])
def test_no_table(faults, table):
    assert f"{table}: expected a table, found 3" in faults(**{table: 3})


def test_nothing_written(faults, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("")
    message = faults(path)
    for fault in (
        "[train]: expected a table",
        "target.model: expected a string",
        "drafter.use: expected a name",
    ):
        assert fault in message


def test_a_drafter_that_nothing_trains(faults):
    assert "drafter.use: no trainable is called 'none'" in faults(drafter={"use": "none"})


def test_no_such_recipe(registry, tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'tiny-train'"):
        TrainingRecipe.load("tiny-tran", registry)
    with pytest.raises(UnknownNameError, match="no recipe file"):
        TrainingRecipe.load(tmp_path / "absent.toml", registry)


@pytest.mark.parametrize(
    "tables", [{"selector": {"use": "opt-tre"}}, {"builder": {"use": "top-m", "branchin": 3}}]
)
def test_what_is_to_decode_later(faults, tables):
    assert "did you mean" in faults(**tables)


def test_a_builder_that_will_not_fit(faults, registry):
    """After hours of training the recipe that decodes would be refused."""
    assert "builder.use: expected contexts of 1 token" in faults(builder={"use": "marginal"})
    assert "builder.use: expected a name, found ['top-m']" in faults(builder={"use": ["top-m"]})
    fitting = {"builder": {"use": "marginal"}, "refiner": {"use": "none"}}
    assert TrainingRecipe.load("tiny-train", registry, fitting).decoding_tables()["builder"]


@pytest.mark.parametrize(
    ("drafter", "refiner", "fault"),
    [
        ({"frozen": True}, "swiglu", "drafter.frozen: expected a drafter.checkpoint to keep, found none"),
        ({**CHECKPOINT, "frozen": True}, "none", "nothing is left to train: the backbone is frozen"),
        ({**CHECKPOINT, "layers": 3, "block_size": 6}, "swiglu", "expected no block_size, layers beside it"),
        (
            {**CHECKPOINT, "checkpoint": "treeflash.testing:models/absent"},
            "swiglu",
            "the package has no folder 'models/absent'",
        ),
        ({"mask_token_id": 1, "target_layer_ids": [0, 4]}, "swiglu", "expected layers 0..3, found [0, 4]"),
        ({"mask_token_id": 1, "target_layer_ids": [-1]}, "swiglu", "expected layers 0..3, found [-1]"),
        ({"mask_token_id": 1, "target_layer_ids": []}, "swiglu", "expected layers 0..3, found []"),
        (
            {"mask_token_id": 1, "target_layer_ids": [1, 1]},
            "swiglu",
            "expected each layer once, found [1, 1]",
        ),
        ({"mask_token_id": 1, "block_size": 2000}, "swiglu", "expected at most 1024, found 2000"),
        ({}, "swiglu", "drafter.mask_token_id: expected a token id below 128, found nothing"),
        ({"mask_token_id": 128}, "swiglu", "expected a token id below 128, found 128"),
        (
            {"mask_token_id": 1, "attention_heads": 4, "key_value_heads": 3},
            "swiglu",
            "drafter.key_value_heads: expected a divisor of the 4 attention heads, found 3",
        ),
        (
            {"mask_token_id": 1, "layers": 2, "intermediate_size": 16, "start": "target"},
            "swiglu",
            "mlp.up_proj.weight: expected shape [16, 64], found [192, 64]",
        ),
        (
            {"mask_token_id": 1, "layers": 9, "start": "target"},
            "swiglu",
            "drafter.layers: the target has 4 to copy",
        ),
    ],
)
def test_parts_that_do_not_fit(run, variant, tmp_path, drafter, refiner, fault):
    recipe = variant(tmp_path, drafter={"use": "dflash", **drafter}, refiner={"use": refiner})
    with pytest.raises((CompositionError, CheckpointError, InputError)) as error:
        run(tmp_path / "out", recipe)
    assert fault in str(error.value)
    assert not (tmp_path / "out").exists()


def test_both_faults_of_a_start(run, variant, tmp_path):
    recipe = variant(tmp_path, drafter={"use": "dflash", "target_layer_ids": [7]})
    with pytest.raises(CompositionError, match=r"2 faults(.|\n)*target_layer_ids(.|\n)*mask_token_id"):
        run(tmp_path / "out", recipe)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"num_target_layers": 5}, "num_target_layers: expected the target's 4, found 5"),
        ({"hidden_size": 32}, "hidden_size: expected the target's 64, found 32"),
        ({"vocab_size": 400}, "vocab_size: expected the target's 128, found 400"),
        (
            {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_theta: expected the target's 10000.0, found 1000000.0",
        ),
    ],
)
def test_a_checkpoint_for_another_target(run, variant, models, tmp_path, change, fault):
    folder = tmp_path / "checkpoint"
    shutil.copytree(models / "tiny-dflash", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    recipe = variant(tmp_path, drafter={"use": "dflash", "checkpoint": str(folder)})
    with pytest.raises(CheckpointError) as error:
        run(tmp_path / "out", recipe)
    assert fault in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_refiner_checkpoint_of_another_kind(run, variant, tmp_path):
    refiner = {"use": "linear", "checkpoint": "treeflash.testing:models/tiny-treeflash"}
    recipe = variant(tmp_path, refiner=refiner)
    with pytest.raises(CheckpointError, match="ar_approximation: expected 'linear', found 'swiglu'"):
        run(tmp_path / "out", recipe)


def test_shared_weights_and_one_process(run, tmp_path):
    with pytest.raises(InputError, match=r"train\.shard: expected several processes, found one"):
        run(tmp_path / "out", train={"shard": True})


def test_shared_weights_and_one_process_and_the_advice_taken(run, tmp_path):
    with pytest.raises(InputError):
        run(tmp_path / "out", train={"shard": True})
    run(tmp_path / "out", train={"shard": False})
