"""Plugins as installed packages: found, asked, kept apart, and harmless when broken."""

import sys

import pytest

import treeflash
from treeflash.components.selectors.chain import Chain
from treeflash.errors import InputError, PluginError, RecipeError, UnknownNameError
from treeflash.plugin_loading import CHOICE
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
    registry = Registry.load()
    assert "acme" not in registry.components["selector"]
    with pytest.raises(PluginError, match="selector 'acme' is claimed by ") as error:
        registry.component("selector", "acme")
    for part in ("acme-trees", "other-trees", f"{CHOICE}=-acme-trees", f"{CHOICE}=-other-trees", "uninstall"):
        assert part in str(error.value)


def test_a_name_that_nobody_asks_for_breaks_nothing(install, command):
    install("acme-trees", plugin=adding("acme"))
    install("other-trees", plugin=adding("acme"))
    status, _, err = command("generate", "tiny-plain", "Ana has 7 apples.", "--max-new-tokens", "3")
    assert status == 0
    assert "acme" not in err
    status, _, err = command(
        "generate",
        "tiny-treeflash",
        "Ana has 7 apples.",
        "-o",
        "selector.use=acme",
        "-o",
        "builder.childen=3",
    )
    assert status == 2
    # One of the recipe's faults, told with the others.
    assert "selector.use: selector 'acme' is claimed by " in err
    assert "builder.childen: unknown key" in err
    assert "'acme' is claimed by" in command("components", "selector")[2]


def test_a_plugin_cannot_take_a_built_in_name(install):
    install("acme-trees", plugin=adding("opt-tree"))
    registry = Registry.load()
    with pytest.raises(PluginError, match="'opt-tree' is claimed by treeflash and by acme-trees") as error:
        registry.component("selector", "opt-tree")
    assert f"switch acme-trees off with {CHOICE}=-acme-trees, or uninstall it" in str(error.value)
    assert registry.component("selector", "chain") is Chain


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
        ("def broken(:", "SyntaxError"),
        ("import sys\nsys.exit('out of luck')", "SystemExit: out of luck"),
        ("class Skipped(BaseException): ...\nraise Skipped", "Skipped"),
    ],
)
def test_a_plugin_that_does_not_load_spoils_nothing(source, reason, install):
    install("broken-trees", plugin=source)
    install("acme-trees", plugin=adding("acme"))
    registry = Registry.load()
    (failure,) = registry.failures["broken-trees"]
    assert failure.startswith(f"entry point plugin: {reason}")
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


def test_two_recipes_of_one_name_are_refused(install, tmp_path):
    source = f"{HEADER}\n@hookimpl\ndef treeflash_recipes():\n    return Path(__file__).parent / 'recipes'\n"
    site = install("acme-trees", plugin=source)
    (site / "recipes").mkdir()
    (site / "recipes" / "tiny-plain.toml").write_text("")
    registry = Registry.load()
    with pytest.raises(PluginError, match="recipe 'tiny-plain' is claimed by treeflash and by acme-trees"):
        registry.recipe("tiny-plain")
    (tmp_path / "mine.toml").write_text('extends = "tiny-plain"')
    with pytest.raises(RecipeError, match="extends: recipe 'tiny-plain' is claimed by"):
        Recipe.load(tmp_path / "mine.toml", registry)


def test_two_targets_of_one_name_are_refused(install):
    hook = "@hookimpl\ndef treeflash_targets():\n    return {'acme-model': Path}"
    install("acme-trees", plugin=f"{HEADER}\n{hook}\n")
    install("other-trees", plugin=f"{HEADER}\n{hook}\n")
    with pytest.raises(PluginError, match="target 'acme-model' is claimed by"):
        treeflash.load("tiny-plain", target={"model": "acme-model"})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('out of luck')", "RuntimeError: out of luck"),
        ("return None", "expected a folder, found None"),
        ("return Path('/no/such/folder')", "expected a folder, found PosixPath('/no/such/folder')"),
    ],
)
def test_a_target_that_fails_names_its_plugin(body, reason, install):
    source = f"""{HEADER}
def model():
    {body}
@hookimpl
def treeflash_targets():
    return {{"acme-model": model}}
"""
    install("acme-trees", plugin=source)
    with pytest.raises(PluginError) as error:
        treeflash.load("tiny-plain", target={"model": "acme-model"})
    assert f"plugin acme-trees: target 'acme-model': {reason}" in str(error.value)


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


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('out of luck')", "raise SystemExit", "return None", "return {'acme': 3}"]
)
def test_a_hook_that_fails_spoils_nothing(body, install):
    install("broken-trees", plugin=f"{HEADER}\n@hookimpl\ndef treeflash_selectors():\n    {body}\n")
    registry = Registry.load()
    assert "acme" not in registry.components["selector"]
    (failure,) = registry.failures["broken-trees"]
    assert failure.startswith("entry point plugin: treeflash_selectors: ")


FAULTY = f"""{HEADER}
@hookimpl
def treeflash_drafter():
    return {{}}

@hookimpl
def treeflash_refiners(registry):
    return {{}}

@hookimpl(wrapper=True)
def treeflash_builders():
    return (yield)

def treeflash_losses():
    return {{}}

@hookimpl
def treeflash_verifiers():
    raise RuntimeError("out of luck")

@hookimpl
def treeflash_selectors():
    return {{"acme": Chain, "wrong": 3}}
"""


def test_all_faults_of_a_plugin_are_told(install, command):
    install("acme-trees", first=adding("one"), second=FAULTY)
    registry = Registry.load()
    assert all(registry.components.values())  # their hooks are called as the kinds are asked for
    told = registry.failures["acme-trees"]
    for fault in (
        "treeflash_drafter: there is no such hook; did you mean 'treeflash_drafters'?",
        "treeflash_refiners: expected no parameters, found registry",
        "treeflash_builders: expected a function that returns what it adds, found a wrapper of others",
        "treeflash_losses: expected the decorator treeflash.hookspecs.hookimpl on it, found none",
        "treeflash_verifiers: RuntimeError: out of luck",
        "treeflash_selectors: expected what its specification returns, found {'wrong': 3}",
    ):
        assert [line for line in told if line.startswith(f"entry point second: {fault}")], fault
    assert len(told) == 6
    # What is right of it works.
    assert registry.component("selector", "one") is registry.component("selector", "acme") is Chain
    err = command("components", "selector")[2]
    assert err.count("treeflash: plugin acme-trees failed: entry point second: ") == 6


def test_stopping_the_program_stops_it(install):
    install("acme-trees", plugin="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        Registry.load()
