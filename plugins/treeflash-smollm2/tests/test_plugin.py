import json
import tomllib
from importlib import resources

import pluggy
import treeflash_smollm2
from safetensors import safe_open

from treeflash import hookspecs


def answers() -> pluggy.HookRelay:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(treeflash_smollm2)
    manager.check_pending()
    return manager.hook


def test_target_is_found_by_name():
    assert answers().treeflash_targets() == [{"smollm2-135m-instruct": treeflash_smollm2.local_model}]


def test_recipes_name_this_target_and_drafter():
    (folder,) = answers().treeflash_recipes()
    recipes = {path.stem: tomllib.loads(path.read_text()) for path in folder.glob("*.toml")}
    assert set(recipes) == {f"smollm2-{name}" for name in ("plain", "dflash", "ddtree", "treeflash")}
    for name, recipe in recipes.items():
        assert recipe["target"]["model"] == "smollm2-135m-instruct"
        checkpoint = recipe["drafter"].get("checkpoint")
        assert checkpoint == (None if name == "smollm2-plain" else "treeflash_smollm2:drafter")


def test_drafter_is_in_the_package():
    drafter = resources.files(treeflash_smollm2) / "drafter"
    assert json.loads((drafter / "config.json").read_text())["num_target_layers"] == 30
    with safe_open(str(drafter / "model.safetensors"), "pt") as file:
        assert "ar_approximation.ug.weight" in file.keys()
