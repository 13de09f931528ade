"""`TREEFLASH_PLUGINS`: which plugins are loaded; what is built in always is."""

import sys

import pytest

from treeflash import builtin
from treeflash.errors import PluginError
from treeflash.plugin_loading import CHOICE
from treeflash.plugins import KINDS, Registry
from treeflash.recipe import Recipe

ACME, BASIC, OTHER = "acme-trees", "basic_trees", "other.trees"
SOURCE = """
from treeflash.components.selectors.chain import Chain
from treeflash.hookspecs import hookimpl

@hookimpl
def treeflash_selectors():
    return {{{name!r}: Chain}}
"""


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """Three plugins on the path, each of which adds a selector of its name."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(CHOICE, raising=False)
    modules = {name: name.replace("-", "_").replace(".", "_") + "_chosen" for name in (ACME, BASIC, OTHER)}
    for name, module in modules.items():
        (tmp_path / f"{module}.py").write_text(SOURCE.format(name=name))
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[treeflash]\nplugin = {module}\n")
    yield tmp_path
    for module in modules.values():
        sys.modules.pop(module, None)


def loaded(choice, monkeypatch):
    """Which of the three are loaded."""
    if choice is not None:
        monkeypatch.setenv(CHOICE, choice)
    registry = Registry.load()
    assert registry.failures == {}
    return {name for name in (ACME, BASIC, OTHER) if name in registry.components["selector"]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, {ACME, BASIC, OTHER}),
        ("", set()),
        (" ", set()),
        (",", set()),
        (" , ,", set()),
        (ACME, {ACME}),
        (f"  {ACME}\t", {ACME}),
        (f"{ACME},", {ACME}),
        (f"{ACME},{OTHER}", {ACME, OTHER}),
        (f" {OTHER} ,  {ACME} ", {ACME, OTHER}),
        (f"{ACME},{ACME}", {ACME}),
        (f"{ACME},{BASIC},{OTHER}", {ACME, BASIC, OTHER}),
        (f"-{ACME}", {BASIC, OTHER}),
        (f" - {ACME} ", {BASIC, OTHER}),
        (f"-{ACME}, -{OTHER}", {BASIC}),
        (f"-{ACME},-{BASIC},-{OTHER}", set()),
        # Naming one means that one alone, whatever else is left out.
        (f"{ACME},-{BASIC}", {ACME}),
        (f"-{BASIC},{ACME}", {ACME}),
        (f"{ACME},-{ACME}", set()),
        (f"{ACME},{OTHER},-{ACME}", {OTHER}),
    ],
)
def test_what_is_chosen_is_loaded(choice, expected, monkeypatch):
    assert loaded(choice, monkeypatch) == expected


UNKNOWN = {
    "acme-tree": "acme-trees",
    "-acme-tree": "acme-trees",
    "Acme-Trees": "acme-trees",
    "acme_trees": "acme-trees",
    "basic-trees": "basic_trees",
    f"{ACME}, othr.trees": "other.trees",
    f"-{ACME}, -othr.trees": "other.trees",
}


@pytest.mark.parametrize("choice", UNKNOWN)
def test_an_unknown_name_gets_the_nearest(choice, monkeypatch):
    monkeypatch.setenv(CHOICE, choice)
    wrong = choice.rpartition(",")[2].strip().removeprefix("-")
    with pytest.raises(PluginError) as error:
        Registry.load()
    message = str(error.value)
    begin = f"TREEFLASH_PLUGINS: no plugin {wrong!r} is installed; did you mean {UNKNOWN[choice]!r}?"
    assert message.startswith(begin)
    assert "known: acme-trees, basic_trees, other.trees" in message


@pytest.mark.parametrize("choice", ["zzzzz", "-zzzzz", "-", "treeflash", f"{ACME} {OTHER}"])
def test_what_is_near_to_nothing_gets_all_names(choice, monkeypatch):
    monkeypatch.setenv(CHOICE, choice)
    with pytest.raises(PluginError, match=r"TREEFLASH_PLUGINS: no plugin '.*' is installed.*acme-trees"):
        Registry.load()


def test_a_plugin_found_twice_is_named_once(site, tmp_path, monkeypatch):
    # As with an editable install whose folder is on the path too.
    (tmp_path / "again").symlink_to(site)
    monkeypatch.syspath_prepend(tmp_path / "again")
    monkeypatch.setenv(CHOICE, "acme-tree")
    with pytest.raises(PluginError) as error:
        Registry.load()
    assert str(error.value).count("basic_trees") == 1


@pytest.mark.parametrize("choice", [None, "", ACME, f"-{ACME}", f"-{ACME},-{BASIC},-{OTHER}"])
def test_the_built_in_parts_are_always_there(choice, monkeypatch):
    loaded(choice, monkeypatch)
    registry = Registry.load()
    for kind in KINDS:
        assert set(getattr(builtin, f"treeflash_{kind}s")()) <= set(registry.components[kind])
    assert set(builtin.treeflash_trainables()) <= set(registry.components["trainable"])
    assert set(builtin.treeflash_losses()) <= set(registry.components["loss"])
    assert Recipe.load("tiny-treeflash", registry).parts["refiner"].use == "swiglu"


def test_without_plugins_all_there_is_is_built_in(monkeypatch):
    monkeypatch.setenv(CHOICE, "")
    registry = Registry.load()
    for registered in (*registry.components.values(), registry.targets, registry.recipes):
        assert {found.origin for found in registered.values()} <= {"treeflash"}


def test_a_plugin_that_is_left_out_is_not_even_imported(site, monkeypatch):
    (site / "acme_trees_chosen.py").write_text("raise RuntimeError('out of luck')\n")
    assert loaded(f"-{ACME}", monkeypatch) == {BASIC, OTHER}
    monkeypatch.delenv(CHOICE)
    assert Registry.load().failures == {ACME: ["entry point plugin: RuntimeError: out of luck"]}
    assert "acme_trees_chosen" not in sys.modules


def test_leaving_one_out_ends_a_quarrel_over_a_name(site, monkeypatch):
    (site / "basic_trees_chosen.py").write_text(SOURCE.format(name=ACME))
    with pytest.raises(PluginError, match="'acme-trees' is claimed by"):
        Registry.load().component("selector", ACME)
    monkeypatch.setenv(CHOICE, f"-{BASIC}")
    assert Registry.load().components["selector"][ACME].origin == ACME
