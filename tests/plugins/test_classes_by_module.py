"""Classes that a recipe names by module, and components that take a table's place in Python."""

import sys

import pytest

import treeflash
from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.errors import RecipeError
from treeflash.interfaces import Selector
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.testing.contracts.contract import PROMPTS
from treeflash.training.training_recipe import TrainingRecipe

PLUGIN = "treeflash.testing.lenient:Lenient"
SOURCE = """
import attrs
from treeflash.components.selectors.chain import Chain
from treeflash.components.losses.forward_kl import ForwardKl

@attrs.frozen
class Short(Chain):
    most: int = 2

    def plan(self, steps, limits):
        limits = super().plan(steps, limits)
        return attrs.evolve(limits, nodes=min(self.most, limits.nodes), depth=min(self.most, limits.depth))

class Mine(ForwardKl):
    '''A loss.'''

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the working directory, which is not on Python's path."""
    monkeypatch.chdir(tmp_path)
    made = []

    def module(name="short_trees", source=SOURCE):
        (tmp_path / f"{name}.py").write_text(source)
        made.append(name)
        return name

    yield module
    for name in made:
        sys.modules.pop(name, None)


def faults(use, kind="selector"):
    with pytest.raises(RecipeError) as error:
        Recipe.load("tiny-dflash", Registry.load(), {kind: {"use": use}})
    return str(error.value).partition(f"{kind}.use: ")[2]


def test_a_class_of_the_working_directory_decodes(module, tmp_path, command):
    path = list(sys.path)
    recipe = tmp_path / "mine.toml"
    recipe.write_text(f'extends = "tiny-dflash"\n[selector]\nuse = "{module()}:Short"\nmost = 1\n')
    decoder = treeflash.load(recipe, target={"dtype": "float32", "device": "cpu"})
    found = decoder.generate(PROMPTS[0], max_new_tokens=20)
    plain = treeflash.load("tiny-plain", target=decoder.target).generate(PROMPTS[0], max_new_tokens=20)
    assert found.token_ids == plain.token_ids
    assert {step.num_drafted for step in found.statistics.steps[:-1]} == {1}
    assert sys.path == path
    # Its options are checked and shown like those of any other.
    assert "most = 1" in command("recipes", "show", recipe)[1]
    status, _, err = command("generate", recipe, "Ana", "-o", "selector.mots=3")
    assert status == 2
    assert "selector.mots: unknown key; did you mean 'most'?" in err


def test_an_installed_module_is_not_hidden_by_one_of_the_working_directory(module):
    module("treeflash", "raise SystemExit")
    checked = Recipe.load("tiny-dflash", Registry.load(), {"verifier": {"use": PLUGIN, "least": 0.5}})
    assert checked.parts["verifier"].options.least == 0.5


@pytest.mark.parametrize(
    ("use", "fault"),
    [
        ("no_such_module:Short", "no module 'no_such_module' on Python's path or in the working directory, "),
        ("no_such.module:Short", "no module 'no_such.module' on Python's path or in the working directory, "),
        ("short_trees.py:Short", "write short_trees:Class"),
        ("short_trees:Shot", "has no Shot; did you mean 'Short'?"),
        ("short_trees:OptTree", "has no OptTree (known: Short)"),
        ("short_trees:Mine", "expected a class that derives from Selector, found the class Mine"),
        ("short_trees:number", "expected a class that derives from Selector, found an int"),
        ("short_trees:", "expected module:Class like mymodule:MyClass, found 'short_trees:'"),
        (":Short", "expected module:Class"),
        ("short trees:Short", "expected module:Class"),
        ("C:\\trees.py:Short", "expected module:Class"),
    ],
)
def test_a_class_that_is_not_there(use, fault, module):
    module()
    assert fault in faults(use)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("\n1 / 0", "ZeroDivisionError: division by zero ("),
        ("def broken(:", "SyntaxError: "),
        ("raise SystemExit('out of luck')", "SystemExit: out of luck"),
    ],
)
def test_a_module_that_cannot_be_imported(source, fault, module):
    told = faults(f"{module('broken_trees', source)}:Short")
    assert f"module 'broken_trees' cannot be imported: {fault}" in told
    assert "broken_trees.py, line " in told


def test_training_recipes_name_classes_by_module_too(module):
    name = module()
    recipe = TrainingRecipe.load("tiny-train", Registry.load(), {"loss": {"use": f"{name}:Mine"}})
    assert recipe.loss.__name__ == "Mine"
    trainable = "treeflash.components.trainables.dflash:DFlashTrainable"
    own = TrainingRecipe.load("tiny-train-refiner", Registry.load(), {"drafter": {"use": trainable}})
    # The class trains; which drafter decodes, it says in what it writes.
    assert "drafter" not in own.decoding_tables()
    assert own.decoding_tables()["refiner"] == {"use": "two-token"}


def test_components_take_the_place_of_tables():
    selector, builder = OptTree(7), TopM(2, 2)
    decoder = treeflash.load("tiny-treeflash", selector=selector, builder=builder, target={"device": "cpu"})
    assert decoder.selector is selector
    assert decoder.builder is builder
    again = treeflash.load("tiny-treeflash", target=decoder.target, selector={"budget": 3})
    assert again.target is decoder.target
    assert again.selector == OptTree(3)
    plain = treeflash.load(
        "tiny-treeflash", drafter=decoder.drafter, refiner=decoder.refiner, target=again.target
    )
    assert plain.drafter is decoder.drafter


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        ({"selector": "chain"}, "selector: expected a table or a Selector, found 'chain'"),
        ({"selector": Chain}, "selector: expected a table or a Selector, found the class Chain itself"),
        ({"selector": TopM()}, "selector: expected a table or a Selector, found a TopM"),
        ({"selector": None}, "selector: expected a table or a Selector, found None"),
        ({"refiner": NoRefiner(), "drafter": {"use": "none"}}, "expected none, because drafter 'none'"),
        ({"builder": TopM(), "slector": Chain()}, "slector: expected it inside a table"),
    ],
)
def test_what_takes_no_tables_place(overrides, fault):
    with pytest.raises(RecipeError) as error:
        treeflash.load("tiny-treeflash", **overrides)
    assert fault in str(error.value)


def test_messages_name_what_was_given():
    class Mine(Selector):
        def select(self, proposal, limits):
            raise NotImplementedError

    with pytest.raises(RecipeError, match=r"tiny-treeflash.toml \(builder.branching, selector overridden\)"):
        Recipe.load("tiny-treeflash", Registry.load(), {"selector": Mine(), "builder": {"branching": "x"}})
