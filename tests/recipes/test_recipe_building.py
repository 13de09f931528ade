"""From a checked recipe to a decoder: where checkpoints are found, and what errors say."""

import shutil
from pathlib import Path

import pytest

import treeflash
from treeflash.errors import CheckpointError, InputError, RecipeError, TreeflashError
from treeflash.places import locate
from treeflash.plugins import Registry
from treeflash.recipe import Recipe, find_model
from treeflash.training.training_recipe import TrainingRecipe

PLACE = "treeflash.testing:models/tiny-treeflash"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_place_inside_a_package(models):
    assert locate(PLACE) == models / "tiny-treeflash"


def test_a_folder_relative_to_where_one_is(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert locate("mine").samefile(tmp_path / "mine")
    assert locate("../" + tmp_path.name + "/mine").samefile(tmp_path / "mine")


def test_an_absolute_folder_and_one_at_home(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(tmp_path / "mine")).samefile(tmp_path / "mine")
    assert locate("~/mine").samefile(tmp_path / "mine")


@pytest.mark.parametrize("place", ["mine", "./mine", "../no/where", "/no/where", "a/b/c"])
def test_a_missing_folder_is_named(place):
    with pytest.raises(InputError) as error:
        locate(place)
    assert repr(place) in str(error.value)
    assert "expected a folder, package:path or hub name" in str(error.value)


def test_a_missing_package_is_named():
    with pytest.raises(InputError, match=r"no package 'no\.such' is installed"):
        locate("no.such:models")


@pytest.mark.parametrize("name", ["m:1", "treeflash.testing:models", "c:/x", "a b"])
def test_a_folder_wins_over_a_package(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate(name).samefile(tmp_path / name)
    assert Path(find_model(name, Registry.load(), "target.model")).samefile(tmp_path / name)


@pytest.mark.parametrize(
    "place",
    [
        "C:/models/x",
        "C:\\models",
        "m:1/x y",
        "x" * 300,
        "a/" + "x" * 300,
        "~nouser-of-that-name/x",
        "a\0b",
        "no.such:x",
    ],
)
def test_a_place_that_is_none_is_one_error(place):
    with pytest.raises(InputError, match=r"drafter\.checkpoint: ") as error:
        locate(place, "drafter.checkpoint")
    assert repr(place) in str(error.value)
    if not place.startswith("a/"):  # which the hub may have
        with pytest.raises(InputError, match=r"target\.model: ") as error:
            find_model(place, Registry.load(), "target.model")
        assert repr(place) in str(error.value)


def test_a_package_that_fails_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "failing_package").mkdir()
    (tmp_path / "failing_package" / "__init__.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="'failing_package' cannot be imported: division by zero"):
        locate("failing_package:models")


@pytest.mark.parametrize("place", ["", " "])
def test_an_empty_place_is_not_the_working_directory(place, tmp_path):
    expected = "expected a folder, package:path or hub name, found"
    for find in (locate, lambda name: find_model(name, Registry.load(), "target.model")):
        with pytest.raises(InputError, match=expected):
            find(place)
    overrides = {
        "target": {"model": place},
        "drafter": {"checkpoint": place},
        "refiner": {"checkpoint": place},
    }
    with pytest.raises(RecipeError) as error:
        Recipe.load("tiny-treeflash", Registry.load(), overrides)
    for key in ("target.model", "drafter.checkpoint", "refiner.checkpoint"):
        assert f"{key}: {expected} {place!r}" in str(error.value)
    file = write(tmp_path / "mine.toml", f'extends = "tiny-treeflash"\ndrafter.checkpoint = "{place}"')
    with pytest.raises(RecipeError, match=rf"drafter\.checkpoint: {expected}"):
        Recipe.load(file, Registry.load())


def test_an_empty_place_of_a_training_is_an_error():
    overrides = {"data": {"states_folder": ""}, "target": {"model": ""}}
    with pytest.raises(RecipeError, match=r"(?s)states_folder: expected a folder, found.*target\.model: exp"):
        TrainingRecipe.load("tiny-train", Registry.load(), overrides)


def test_a_hub_name_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(name, **options):
        asked.append((name, options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate("peerrh/treeflash-qwen3-4b") == tmp_path
    # Pickles are not read, so they are not fetched either.
    assert asked == [("peerrh/treeflash-qwen3-4b", ["*.json", "*.safetensors"])]


def test_a_folder_wins_over_a_hub_name(tmp_path, monkeypatch):
    (tmp_path / "peerrh" / "mine").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    assert locate("peerrh/mine").samefile(tmp_path / "peerrh" / "mine")


@pytest.mark.parametrize(
    "cause",
    [
        OSError("no network\nand more"),
        ValueError("no network"),
        OSError(),
    ],
)
def test_a_failed_download_gives_its_reason(cause, monkeypatch):
    def download(name, **options):
        raise cause

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match="'a/b' is no folder and cannot be downloaded") as error:
        locate("a/b")
    assert "and more" not in str(error.value)
    assert error.value.__cause__ is cause


def test_a_module_that_is_no_package_is_refused():
    with pytest.raises(InputError):
        locate("treeflash.errors:models")


def test_a_checkpoint_beside_the_recipe(tmp_path, models, monkeypatch):
    shutil.copytree(models / "tiny-treeflash", tmp_path / "mine" / "weights")
    recipe = write(
        tmp_path / "mine" / "r.toml", 'extends = "tiny-treeflash"\n[drafter]\ncheckpoint = "weights"\n'
    )
    monkeypatch.chdir(tmp_path)
    decoder = treeflash.load("mine/r.toml")
    # The refiner's checkpoint is the drafter's when it names none.
    assert decoder.refiner is not None
    assert Recipe.load(recipe, Registry.load()).parts["refiner"].options.checkpoint is None


def test_a_refiner_from_another_checkpoint(tmp_path, models):
    shutil.copytree(models / "tiny-treeflash", tmp_path / "other")
    recipe = write(
        tmp_path / "r.toml",
        'extends = "tiny-treeflash"\n'
        '[drafter]\ncheckpoint = "treeflash.testing:models/tiny-dflash"\n'
        '[refiner]\ncheckpoint = "other"\n',
    )
    decoder = treeflash.load(recipe)
    assert decoder.drafter.facts.refiner is None


def test_a_bases_relative_checkpoint_stays_beside_the_base(tmp_path, models):
    shutil.copytree(models / "tiny-treeflash", tmp_path / "weights")
    write(tmp_path / "base.toml", 'extends = "tiny-treeflash"\n[drafter]\ncheckpoint = "weights"\n')
    recipe = write(tmp_path / "sub" / "r.toml", 'extends = "../base.toml"\n')
    treeflash.load(recipe)


@pytest.mark.parametrize(
    ("text", "kind", "parts"),
    [
        ("[target]\nmodel = 'nowhere'", InputError, ["target.model", "'nowhere'"]),
        (
            "[target]\nmodel = 'treeflash.testing:nowhere'",
            InputError,
            ["target.model", "no folder 'nowhere'"],
        ),
        (
            "[target]\ndtype = 'int8'",
            RecipeError,
            ["target.dtype: expected auto, fastest", "found 'int8'"],
        ),
        ("[target]\ndtype = 'Tensor'", RecipeError, ["target.dtype", "found 'Tensor'"]),
        ("[target]\ndevice = 'abacus'", InputError, ["target.device", "found 'abacus'"]),
        (
            "[drafter]\ncheckpoint = 'nowhere'",
            InputError,
            ["drafter.checkpoint: expected", "found 'nowhere'"],
        ),
        ("[drafter]\ncheckpoint = 'treeflash.testing:nowhere'", InputError, ["no folder 'nowhere'"]),
        (
            "[drafter]\ncheckpoint = 'treeflash.testing:models/tiny-target'",
            CheckpointError,
            ["tiny-target", "block_size", "target_layer_ids"],
        ),
        ("[refiner]\nuse = 'linear'", CheckpointError, ["expected 'linear', found 'swiglu'"]),
        (
            "[drafter]\ncheckpoint = 'treeflash.testing:models/tiny-dflash'",
            CheckpointError,
            ["tiny-dflash", "expected 'swiglu', found no refiner"],
        ),
    ],
)
def test_build_errors_name_the_recipe(text, kind, parts, tmp_path):
    recipe = write(tmp_path / "mine.toml", f'extends = "tiny-treeflash"\n{text}\n')
    with pytest.raises(TreeflashError) as error:
        treeflash.load(recipe)
    assert isinstance(error.value, kind)
    message = str(error.value)
    assert message.startswith(f"{recipe}: ")
    assert message.count(str(recipe)) == 1
    for part in parts:
        assert part in message
