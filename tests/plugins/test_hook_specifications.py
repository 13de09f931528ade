"""The hooks themselves, and that the built-in parts come through them."""

import inspect

import pytest

from treeflash import builtin, hookspecs
from treeflash.interfaces import Component, Drafter, Refiner, Selector, TreeBuilder, Verifier
from treeflash.plugins import KINDS, Registry
from treeflash.trainable import Loss, Trainable

HOOKS = {name: value for name, value in vars(hookspecs).items() if name.startswith("treeflash_")}
CLASSES = {
    "drafter": Drafter,
    "builder": TreeBuilder,
    "refiner": Refiner,
    "selector": Selector,
    "verifier": Verifier,
}
OTHERS = {"treeflash_targets", "treeflash_recipes", "treeflash_trainables", "treeflash_losses"}


@pytest.mark.parametrize("name", HOOKS)
def test_each_hook_is_documented(name):
    summary = inspect.getdoc(HOOKS[name])
    assert summary.splitlines()[0].startswith("Adds ")
    assert "Returns:" in summary
    # pluggy finds a specification by this mark alone.
    assert hasattr(HOOKS[name], "treeflash_spec")


def test_each_kind_has_a_hook():
    assert {f"treeflash_{kind}s" for kind in KINDS} <= set(HOOKS)
    assert set(HOOKS) - {f"treeflash_{kind}s" for kind in KINDS} == OTHERS
    assert set(KINDS) == set(CLASSES)


def test_built_in_parts_come_through_the_hooks():
    implemented = {name for name in vars(builtin) if name.startswith("treeflash_")}
    assert {f"treeflash_{kind}s" for kind in KINDS} | {"treeflash_recipes"} <= implemented
    assert implemented <= set(HOOKS)
    registry = Registry.load()
    for kind in KINDS:
        added = getattr(builtin, f"treeflash_{kind}s")()
        assert added
        for name, component in added.items():
            assert registry.component(kind, name) is component
            assert registry.components[kind][name].origin == "treeflash"
            assert issubclass(component, CLASSES[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_each_built_in_part_takes_options_from_a_table(kind):
    for component in getattr(builtin, f"treeflash_{kind}s")().values():
        assert issubclass(component, Component)
        assert hasattr(component.options_class(), "__attrs_attrs__")
        assert inspect.getdoc(component)


def test_what_trains_comes_through_the_hooks():
    registry = Registry.load()
    for kind, added, base in (
        ("trainable", builtin.treeflash_trainables(), Trainable),
        ("loss", builtin.treeflash_losses(), Loss),
    ):
        assert added
        for name, value in added.items():
            assert registry.component(kind, name) is value
            assert issubclass(value, base)
    # A trainable belongs to a drafter.
    assert set(builtin.treeflash_trainables()) <= set(builtin.treeflash_drafters())


def test_built_in_recipes_are_found():
    registry = Registry.load()
    folder = builtin.treeflash_recipes()
    assert registry.recipe("tiny-plain") == folder / "tiny-plain.toml"
