"""The recipes that come with the package."""

import tomllib

import pytest

import treeflash
from treeflash.builtin import treeflash_recipes
from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.errors import RecipeError
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.recipe_tables import find, open_tables
from treeflash.training.training_recipe import TrainingRecipe

REGISTRY = Registry.load()
FILES = {
    path.stem: path for path in sorted(treeflash_recipes().rglob("*.toml")) if path.parent.name != "studies"
}
TRAINING = [name for name in FILES if "train" in open_tables(name, REGISTRY, None).tables]
SHIPPED = [name for name in FILES if name not in TRAINING]
TINY = ["tiny-plain", "tiny-dflash", "tiny-ddtree", "tiny-treeflash"]


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


@pytest.mark.parametrize("name", SHIPPED)
def test_each_loads_by_name(name, registry):
    recipe = Recipe.load(name, registry)
    assert recipe.path == find(name, registry)
    assert recipe.path.stem == name
    assert {"drafter", "selector", "verifier"} <= set(recipe.parts)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_loads_by_path(name, registry):
    path = find(name, registry)
    assert Recipe.load(path, registry) == Recipe.load(str(path), registry) == Recipe.load(name, registry)


@pytest.mark.parametrize("name", FILES)
def test_each_begins_by_saying_what_it_is(name, registry):
    assert find(name, registry).read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("name", TRAINING)
def test_each_training_recipe_loads_where_it_belongs(name, registry):
    assert TrainingRecipe.load(name, registry).train.steps > 0
    with pytest.raises(RecipeError, match="treeflash train") as caught:
        Recipe.load(name, registry)
    assert len(str(caught.value).splitlines()) == 1


def test_the_tiny_ones_are_there():
    assert set(TINY) <= set(SHIPPED)


def test_tables_become_options(registry):
    recipe = Recipe.load("tiny-treeflash", registry)
    assert recipe.target.model == "treeflash.testing:models/tiny-target"
    assert {kind: part.use for kind, part in recipe.parts.items()} == {
        "drafter": "dflash",
        "builder": "top-m",
        "refiner": "swiglu",
        "selector": "opt-tree",
        "verifier": "sdpa-tree",
    }
    assert recipe.parts["builder"].options == TopM(branching=16, children=16)
    assert recipe.parts["selector"].options == OptTree(budget=15)


def test_no_selector_or_verifier_means_the_default_ones(registry):
    text = tomllib.loads(find("tiny-plain", registry).read_text(encoding="utf-8"))
    assert set(text) == {"target", "drafter"}
    parts = Recipe.load("tiny-plain", registry).parts
    assert isinstance(parts["selector"].options, OptTree)
    assert isinstance(parts["verifier"].options, SdpaTree)


def test_load_builds_with_overrides():
    decoder = treeflash.load("tiny-treeflash", selector={"budget": 3})
    assert isinstance(decoder.refiner, SwiGlu)
    assert decoder.selector == OptTree(budget=3)
    prompt = decoder.target.text.encode_chat("Ana has 7 apples.")
    found = decoder.generate(prompt, max_new_tokens=40)
    assert max(step.num_drafted for step in found.statistics.steps) == 3
    plain = treeflash.load("tiny-plain").generate(prompt, max_new_tokens=40)
    assert found.token_ids == plain.token_ids


def test_a_recipe_is_built_anew_each_time():
    first, second = treeflash.load("tiny-plain"), treeflash.load("tiny-plain")
    assert first.target.model is not second.target.model


def test_target_options_reach_the_target():
    decoder = treeflash.load("tiny-dflash", target={"dtype": "float64", "device": "cpu"})
    assert str(decoder.target.dtype) == "torch.float64"
    assert str(decoder.target.device) == "cpu"
    assert {str(weight.dtype) for weight in decoder.drafter.network.parameters()} == {"torch.float64"}
