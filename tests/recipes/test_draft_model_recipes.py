"""A smaller model as drafter, out of a recipe: found as the target is, and refused in one message."""

import json
import shutil
import sys
from pathlib import Path

import attrs
import pytest
import torch

import treeflash
from treeflash.cli import main
from treeflash.components.drafters.draft_model import DraftModel
from treeflash.errors import InputError, TreeflashError
from treeflash.plugins import Registered, Registry
from treeflash.recipe import Recipe, find_model
from treeflash.testing.reference import reference_text

TARGET = "treeflash.testing:models/tiny-target"
RECIPE = 'extends = "tiny-plain"\n[target]\ndevice = "cpu"\n[drafter]\nuse = "draft-model"\n'


def write(folder, text):
    path = folder / "mine.toml"
    path.write_text(f"{RECIPE}{text}\n", encoding="utf-8")
    return path


def test_the_shipped_one_drafts_nearly_all():
    decoder = treeflash.load("tiny-draft-model", target={"device": "cpu"})
    assert isinstance(decoder.drafter, DraftModel)
    prompt = decoder.target.text.encode_chat("Ana has 7 apples.")
    for settings in ({}, {"temperature": 0.8, "seed": 3}):
        result = decoder.generate(prompt, max_new_tokens=60, **settings)
        expected = reference_text(
            decoder.target.model, prompt, 60, stop_ids=decoder.target.stop_ids, **settings
        )
        assert list(result.token_ids) == expected
        assert result.statistics.block_efficiency > (4 if settings else 5)


def test_a_model_beside_the_recipe(tmp_path, models, monkeypatch):
    shutil.copytree(models / "tiny-target", tmp_path / "small")
    recipe = write(tmp_path, 'model = "small"\ndepth = 2\nchildren = 3\ntemperature = 0.5')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    drafter = treeflash.load(recipe).drafter
    assert (drafter.depth, drafter.children, drafter.temperature) == (2, 3, 0.5)
    assert drafter.model.model.config._name_or_path == str(tmp_path / "small")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("", torch.float64), ('dtype = "auto"', torch.float64), ('dtype = "bfloat16"', torch.bfloat16)],
)
def test_auto_is_the_targets_own_dtype(dtype, expected, tmp_path):
    decoder = treeflash.load(write(tmp_path, f'model = "{TARGET}"\n{dtype}'), target={"dtype": "float64"})
    assert decoder.drafter.model.dtype == expected
    result = decoder.generate([2, *b"Ana"], max_new_tokens=12)
    assert list(result.token_ids) == reference_text(decoder.target.model, [2, *b"Ana"], 12)


def test_what_a_plugin_provides_and_what_is_on_the_hub(models):
    provided = {"acme": Registered(lambda: models / "tiny-target", "acme-models")}
    registry = attrs.evolve(Registry.load(), targets=provided)
    assert find_model("acme", registry, "drafter.model") == models / "tiny-target"
    assert find_model("owner/name", registry, "drafter.model") == "owner/name"
    with pytest.raises(InputError) as error:
        find_model("acmee", registry, "drafter.model")
    assert str(error.value) == (
        "drafter.model: no folder, hub name or target is called 'acmee'; did you mean 'acme'? (known: acme)"
    )


def with_two_tokens_swapped(models, folder):
    """The tiny target, with the ids of "a" and "b" exchanged."""
    shutil.copytree(models / "tiny-target", folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


def test_another_tokenizer_is_refused_when_the_recipe_is_built(tmp_path, models):
    with_two_tokens_swapped(models, tmp_path / "small")
    recipe = write(tmp_path, 'model = "small"')
    with pytest.raises(TreeflashError) as error:
        treeflash.load(recipe)
    assert str(error.value) == (
        f"{recipe}: drafter.model: expected the target's tokenizer, found another: 2 of the target's 128 "
        "tokens are others here, the first is 97: 'a' there, 'b' here"
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["drafter.model: expected a string, found nothing"]),
        ('model = "x"\ndtype = "int8"', ["drafter.dtype: expected auto, float32", "found 'int8'"]),
        ('model = "x"\ndepth = 0', ["drafter.depth: expected >= 1, found 0"]),
        ('model = "x"\nchildren = 0', ["drafter.children: expected >= 1, found 0"]),
        ('model = "x"\ntemperature = 0.0', ["drafter.temperature: expected > 0, found 0.0"]),
        ('model = "nowhere"', ["drafter.model: no folder, hub name or target is called 'nowhere'"]),
        (
            'model = "treeflash.testing:models/tiny-targt"',
            ["drafter.model: ", "no folder 'models/tiny-targt'; did you mean 'tiny-target'?"],
        ),
        ('model = "."', ["drafter.model: draft model ", " cannot be loaded: "]),
        (f'model = "{TARGET}"\n[refiner]\nuse = "swiglu"', ["refiner.use: expected none, because drafter"]),
    ],
)
def test_mistakes_name_the_recipe_and_the_key(text, parts, tmp_path):
    recipe = write(tmp_path, text)
    with pytest.raises(TreeflashError) as error:
        treeflash.load(recipe)
    message = str(error.value)
    assert message.startswith(f"{recipe}: ")
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message


def test_the_check_says_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["treeflash", "check", "tiny-draft-model", "-o", "target.device=cpu"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert (
        "drafter: draft-model, 0.9 MB of weights, 5 levels, target layers read: none"
        in capsys.readouterr().out
    )


def test_a_target_given_by_hand_is_drafted_for(tiny_target):
    registry = Registry.load()
    decoder = Recipe.load("tiny-draft-model", registry).build(registry, tiny_target)
    assert decoder.drafter.model.device == tiny_target.device
    assert Path(decoder.drafter.model.model.config._name_or_path).name == "tiny-target"
