"""Parts that a plugin brings, used by a recipe like any other: the text stays the target's."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

import treeflash
from treeflash.errors import RecipeError
from treeflash.interfaces import Selector
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.structuring import structure

PROMPT = "Ana has 7 apples."


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """The plugin beside this file, as an installed package."""
    info = tmp_path / "repeating-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: repeating\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treeflash]\nrepeating = repeating_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    yield importlib.import_module("repeating_plugin")
    del sys.modules["repeating_plugin"]


def generate(name, **settings):
    decoder = treeflash.load(name, target={"dtype": "float32"})
    prompt = decoder.target.text.encode_chat(PROMPT)
    return decoder.generate(prompt, max_new_tokens=120, **settings)


@pytest.fixture
def recipe(tmp_path):
    def write(text) -> Path:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return write


REPEAT = 'extends = "tiny-plain"\n[drafter]\nuse = "repeat"\n'
SHALLOW = 'extends = "tiny-treeflash"\n[selector]\nuse = "shallow"\nbudget = 6\n'


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "seed": 5}])
@pytest.mark.parametrize("text", [REPEAT, f"{REPEAT}length = 1", SHALLOW, f"{SHALLOW}levels = 1"])
def test_the_text_is_the_targets(text, settings, recipe):
    found, expected = generate(recipe(text), **settings), generate("tiny-plain", **settings)
    assert found.token_ids == expected.token_ids
    assert found.stop_reason == expected.stop_reason


def test_a_token_by_token_drafter_is_asked_and_believed(recipe):
    found = generate(recipe(REPEAT))
    assert max(step.num_drafted for step in found.statistics.steps) == 3
    # "apples" repeats a letter, so the bet is won now and then.
    assert sum(step.num_accepted for step in found.statistics.steps) > 0
    assert len(found.statistics.steps) < found.new_tokens - 1


def test_a_selectors_plan_bounds_the_trees(recipe):
    depths = [step.tree_depth for step in generate(recipe(SHALLOW)).statistics.steps]
    assert max(depths) == 2


def test_options_come_from_the_table(recipe, installed):
    parts = Recipe.load(recipe(f"{REPEAT}length = 5"), Registry.load()).parts
    assert parts["drafter"].options == installed.Repeat(length=5)


def test_a_plugins_options_are_checked_like_the_built_in_ones(recipe):
    with pytest.raises(RecipeError) as error:
        Recipe.load(recipe(f'{REPEAT}lenght = 5\nlength = "5"'), Registry.load())
    message = str(error.value)
    assert "drafter.lenght: unknown key; did you mean 'length'?" in message
    assert "drafter.length: expected an integer, found '5'" in message


@pytest.mark.parametrize("table", ['[builder]\nuse = "top-m"', '[refiner]\nuse = "swiglu"'])
def test_nothing_may_stand_behind_a_drafter_of_proposals(table, recipe):
    with pytest.raises(
        RecipeError, match="expected none, because drafter 'repeat' gives no hidden states to build on"
    ):
        Recipe.load(recipe(f"{REPEAT}{table}"), Registry.load())


def test_a_part_that_is_none_may_stand_anywhere(recipe):
    """So that an override can take away the parts of the recipe it changes."""
    parts = Recipe.load(
        recipe(f'{REPEAT}[builder]\nuse = "none"\n[refiner]\nuse = "none"'), Registry.load()
    ).parts
    assert set(parts) == {"drafter", "selector", "verifier"}


def test_each_part_is_short(installed):
    # What a plugin author has to write is a page, not a chapter.
    for part in (installed.Repeats, installed.Repeat, installed.Shallow):
        assert len(inspect.getsource(part).splitlines()) < 25


class NotAttrs(Selector):
    """A selector without options, written without attrs."""

    def plan(self, steps, limits):
        return limits

    def select(self, proposal, limits):
        raise NotImplementedError


def test_a_part_without_attrs_is_a_fault_that_says_so():
    faults = []
    structure({}, NotAttrs, "selector", faults)
    assert "attrs" in faults[0]
