"""Damaged recipes, training recipes and studies: each is read, or refused with one error.

Those that are read and name the tiny target are built and decode a few tokens.
"""

import tomllib

import pytest
import tomli_w

from treeflash.builtin import treeflash_recipes
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.recipe_tables import open_tables
from treeflash.training.training_recipe import TrainingRecipe

from .cases import try_all
from .mutations import mutated_bytes, mutated_value

FILES = sorted(treeflash_recipes().rglob("*.toml"))


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


def without_none(value):
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: without_none(kept) for key, kept in value.items() if kept is not None}
    if isinstance(value, list):
        return [without_none(kept) for kept in value if kept is not None]
    return value


def is_study(path):
    return path.parent.name == "studies"


def damaged(path, registry, chance):
    """A recipe's file with some damage."""
    if chance.random() < 0.25:
        return mutated_bytes(path.read_bytes(), chance)
    whole = not is_study(path) and chance.random() < 0.5
    tables = open_tables(path, registry, None).tables if whole else tomllib.loads(path.read_text())
    for _ in range(chance.choice((1, 1, 2))):
        tables = mutated_value(tables, chance)
    tables = without_none(tables)
    return tomli_w.dumps(tables if isinstance(tables, dict) else {"recipe": str(tables)}).encode()


def test_recipes(registry, tmp_path, tiny_targets, fuzz_cases, monkeypatch):
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path / "cache"))
    target = tiny_targets["cpu"]
    trains = {path for path in FILES if "train" in open_tables(path, registry, None).tables}

    def attempt(case, chance):
        original, path = chance.choice(FILES), tmp_path / f"case-{case}.toml"
        path.write_bytes(damaged(original, registry, chance))
        if is_study(original):
            StudyPlan.load(path, registry)
        elif original in trains:
            TrainingRecipe.load(path, registry)
        else:
            recipe = Recipe.load(path, registry)
            if recipe.target.model.startswith("treeflash.testing:"):
                recipe.build(registry, target).generate([2, *b"Ana has"], max_new_tokens=4)

    try_all(fuzz_cases, attempt)
