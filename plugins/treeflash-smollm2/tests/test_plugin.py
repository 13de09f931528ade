import json
from importlib import resources

import pluggy
import pytest
import treeflash_smollm2
from safetensors import safe_open

from treeflash import hookspecs
from treeflash.plugins import Registry
from treeflash.recipe import Recipe


def answers() -> pluggy.HookRelay:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(treeflash_smollm2)
    manager.check_pending()
    return manager.hook


def test_target_is_found_by_name():
    assert answers().treeflash_targets() == [{"smollm2-135m-instruct": treeflash_smollm2.local_model}]


@pytest.mark.parametrize("name", ["plain", "dflash", "ddtree", "treeflash"])
def test_recipes_are_sound_and_name_this_target_and_drafter(name):
    recipe = Recipe.load(f"smollm2-{name}", Registry.load())
    assert recipe.target.model == "smollm2-135m-instruct"
    if name != "plain":
        assert recipe.parts["drafter"].options.checkpoint == "treeflash_smollm2:drafter"


def test_trees_are_chosen_alike():
    registry = Registry.load()
    selectors = [
        Recipe.load(f"smollm2-{name}", registry).parts["selector"] for name in ("ddtree", "treeflash")
    ]
    assert selectors[0].options == selectors[1].options


def test_drafter_is_in_the_package():
    drafter = resources.files(treeflash_smollm2) / "drafter"
    assert json.loads((drafter / "config.json").read_text())["num_target_layers"] == 30
    with safe_open(str(drafter / "model.safetensors"), "pt") as file:
        assert "ar_approximation.ug.weight" in file.keys()
