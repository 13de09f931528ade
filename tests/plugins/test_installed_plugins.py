"""Plugins as installed packages: found, asked, kept apart, and harmless when broken."""

import sys

import pytest

import treeflash
from treeflash.components.selectors.chain import Chain
from treeflash.errors import InputError, PluginError, UnknownNameError
from treeflash.plugins import Registry
from treeflash.recipe import Recipe, find_model

HEADER = """
from pathlib import Path
from treeflash.components.selectors.chain import Chain
from treeflash.hookspecs import hookimpl
"""


def adding(name, hook="treeflash_selectors"):
    return f"{HEADER}\n@hookimpl\ndef {hook}():\n    return {{{name!r}: Chain}}\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution with its modules on the path, as an installer would."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    made = []

    def install(distribution, **modules):
        names = {entry: f"{distribution.replace('-', '_')}_{entry}" for entry in modules}
        for entry, source in modules.items():
            (site / f"{names[entry]}.py").write_text(source, encoding="utf-8")
        made.extend(names.values())
        info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{entry} = {name}" for entry, name in names.items()]
        (info / "entry_points.txt").write_text("\n".join(["[treeflash]", *lines, ""]))
        return site

    yield install
    for name in made:
        sys.modules.pop(name, None)


def test_a_plugin_adds_to_what_is_built_in(install):
    before = Registry.load()
    install("acme-trees", plugin=adding("acme"))
    registry = Registry.load()
    assert registry.component("selector", "acme") is Chain
    assert registry.components["selector"]["acme"].origin == "acme-trees"
    assert set(registry.components["selector"]) == {*before.components["selector"], "acme"}
    assert registry.failures == before.failures


def test_each_registry_looks_anew(install):
    first = Registry.load()
    install("acme-trees", plugin=adding("acme"))
    assert "acme" not in first.components["selector"]
    second, third = Registry.load(), Registry.load()
    assert "acme" in second.components["selector"]
    assert second is not third
    assert second.components["selector"] is not third.components["selector"]
    assert second == third


def test_names_of_other_kinds_do_not_clash(install):
    install("acme-trees", plugin=adding("top-m"))
    registry = Registry.load()
    assert registry.component("selector", "top-m") is Chain
    assert registry.component("builder", "top-m") is not Chain


def test_two_plugins_that_claim_a_name_are_both_named(install):
    install("acme-trees", plugin=adding("acme"))
    install("other-trees", plugin=adding("acme"))
    with pytest.raises(PluginError, match="'acme' is claimed by ") as error:
        Registry.load()
    assert "acme-trees" in str(error.value)
    assert "other-trees" in str(error.value)
    assert "treeflash_selectors" in str(error.value)


def test_a_plugin_cannot_take_a_built_in_name(install):
    install("acme-trees", plugin=adding("opt-tree"))
    with pytest.raises(PluginError, match="'opt-tree' is claimed by treeflash and by acme-trees"):
        Registry.load()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
        ("def broken(:", "SyntaxError"),
        (
            f"{HEADER}\n@hookimpl\ndef treeflash_selectors(wrong):\n    return {{}}",
            "PluginValidationError",
        ),
    ],
)
def test_a_plugin_that_does_not_load_spoils_nothing(source, reason, install):
    install("broken-trees", plugin=source)
    install("acme-trees", plugin=adding("acme"))
    registry = Registry.load()
    assert reason in registry.failures["broken-trees"]
    assert registry.component("selector", "acme") is Chain
    assert Recipe.load("tiny-treeflash", registry).parts["selector"].use == "opt-tree"


def test_a_plugin_that_does_not_load_is_named_when_a_name_is_missing(install):
    install("broken-trees", plugin="raise RuntimeError('out of luck')")
    registry = Registry.load()
    with pytest.raises(UnknownNameError) as error:
        registry.component("selector", "opt-tre")
    message = str(error.value)
    for part in ("'opt-tre'", "did you mean 'opt-tree'", "broken-trees failed", "out of luck"):
        assert part in message
    with pytest.raises(UnknownNameError, match="broken-trees failed"):
        registry.recipe("nowhere")
    with pytest.raises(InputError, match=r"target is called 'nothing'.*broken-trees failed"):
        find_model("nothing", registry, "target.model")


@pytest.mark.parametrize("kind", ["drafter", "selector"])
def test_unknown_names_say_kind_and_choices(kind):
    with pytest.raises(LookupError, match=f"no {kind} is called 'zzz'.*known: "):
        Registry.load().component(kind, "zzz")


def test_a_plugin_adds_recipes_and_targets(install, models):
    source = f"""{HEADER}
FOLDER = Path(__file__).parent / "recipes"
@hookimpl
def treeflash_recipes():
    return FOLDER
@hookimpl
def treeflash_targets():
    return {{"acme-model": lambda: Path({str(models / "tiny-target")!r})}}
"""
    site = install("acme-trees", plugin=source)
    (site / "recipes" / "deep").mkdir(parents=True)
    recipe = site / "recipes" / "deep" / "acme.toml"
    recipe.write_text('extends = "tiny-plain"\n[target]\nmodel = "acme-model"\n')
    registry = Registry.load()
    assert registry.recipe("acme") == recipe
    assert Recipe.load("acme", registry).target.model == "acme-model"
    assert treeflash.load("acme").generate([72, 105], max_new_tokens=3).new_tokens == 3


def test_a_misspelled_target_gets_the_nearest_name(install):
    hook = "@hookimpl\ndef treeflash_targets():\n    return {'acme-model': Path}"
    install("acme-trees", plugin=f"{HEADER}\n{hook}\n")
    with pytest.raises(treeflash.TreeflashError, match="did you mean 'acme-model'"):
        treeflash.load("tiny-plain", target={"model": "acme-modl"})


def test_two_recipes_of_one_name_are_refused(install):
    source = f"{HEADER}\n@hookimpl\ndef treeflash_recipes():\n    return Path(__file__).parent / 'recipes'\n"
    site = install("acme-trees", plugin=source)
    (site / "recipes").mkdir()
    (site / "recipes" / "tiny-plain.toml").write_text("")
    with pytest.raises(PluginError, match="'tiny-plain' is claimed by treeflash and by acme-trees"):
        Registry.load()


def test_a_distribution_found_twice_counts_once(install, tmp_path, monkeypatch):
    site = install("acme-trees", plugin=adding("acme"))
    # As with an editable install whose folder is on the path too.
    link = tmp_path / "again"
    link.symlink_to(site)
    monkeypatch.syspath_prepend(link)
    registry = Registry.load()
    assert registry.component("selector", "acme") is Chain
    assert "acme-trees" not in registry.failures


def test_a_distribution_may_have_several_entry_points(install):
    install("acme-trees", first=adding("one"), second=adding("two"))
    registry = Registry.load()
    assert {"one", "two"} <= set(registry.components["selector"])


@pytest.mark.parametrize("body", ["raise RuntimeError('out of luck')", "return None", "return {'acme': 3}"])
def test_a_hook_that_fails_spoils_nothing(body, install):
    install("broken-trees", plugin=f"{HEADER}\n@hookimpl\ndef treeflash_selectors():\n    {body}\n")
    registry = Registry.load()
    assert "broken-trees" in registry.failures
    assert "acme" not in registry.components["selector"]


def test_a_misspelled_hook_is_noticed(install):
    install("acme-trees", plugin=adding("acme", hook="treeflash_selector"))
    assert "treeflash_selector" in Registry.load().failures["acme-trees"]
