"""`treeflash components`: everything that is installed, from where, and what each part takes."""

import importlib.metadata
import inspect
import re
import sys
import tomllib
from typing import get_type_hints

import attrs
import pytest
from click.testing import CliRunner

from treeflash import builtin
from treeflash.cli import commands, main
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.describing import option_rows
from treeflash.plugins import Registry

HEADINGS = {
    "drafter": "Drafters",
    "builder": "Tree builders",
    "refiner": "Refiners",
    "selector": "Selectors",
    "verifier": "Verifiers",
    "trainable": "Ways to train a drafter",
    "loss": "Losses",
}
HOOKS = {"loss": "treeflash_losses"}
WORDS = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    int | None: "an integer",
    float | None: "a number",
    str | None: "a string",
    list[int] | None: "a list (an integer each)",
}
COMPONENT = re.compile(r"  (?P<name>\S+)  \[(?P<origin>[^\]]+)\]  (?P<summary>\S.*)")
SELECTORS = """\
Selectors
  chain  [treeflash {version}]  {chain}
      budget: an integer
  cost-aware  [treeflash {version}]  {cost_aware}
      most: an integer = 127
      depth: an integer
      beam: an integer
      refresh: true or false = false
  opt-tree  [treeflash {version}]  {opt_tree}
      budget: an integer = 63
      depth: an integer
      beam: an integer

"""


def invoke(*arguments):
    result = CliRunner().invoke(commands, ["components", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def listed(*arguments):
    """What is listed: by heading and name, the origin, the summary and a line for each option."""
    found, part, heading = {}, [], ""
    for line in invoke(*arguments).stdout.splitlines():
        match = COMPONENT.fullmatch(line)
        if match:
            part = found[heading][match["name"]] = [match["origin"], match["summary"]]
        elif line.startswith("      "):
            part.append(line.strip())
        elif line.startswith("  "):  # a target has no summary
            name, _, origin = line.strip().partition("  ")
            found[heading][name] = [origin.strip("[]")]
        elif line:
            heading = line
            found[heading] = {}
    return found


def option_classes(kind, component):
    """The classes that a recipe's and a training recipe's table become."""
    first = component.Options if kind == "trainable" else component.options_class()
    taught = getattr(component, "TrainingOptions", None)
    return [(first, ""), *([(taught, ", in training")] if taught else [])]


def option_line(field, kind, where):
    if field.default is attrs.NOTHING:
        said = ", required"
    elif field.default is None:
        said = ""
    elif isinstance(field.default, str):
        said = f' = "{field.default}"'
    else:
        said = f" = {str(field.default).lower()}"
    return f"{field.name}: {WORDS[kind]}{said}{where}"


@pytest.fixture
def alone(monkeypatch):
    """The built-in parts and no plugin."""
    monkeypatch.setenv("TREEFLASH_PLUGINS", "")
    return Registry.load()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a distribution of one module on the path; no other plugin is loaded."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def install(name, source):
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(f"from treeflash.hookspecs import hookimpl\n{source}\n")
        info = tmp_path / f"{module}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[treeflash]\nplugin = {module}\n")
        made.append(name)
        monkeypatch.setenv("TREEFLASH_PLUGINS", ",".join(made))

    yield install
    for name in made:
        sys.modules.pop(name.replace("-", "_"), None)


def test_every_registered_component_is_listed_with_its_package_and_version():
    found, registry = listed(), Registry.load()
    assert list(found)[: len(HEADINGS)] == list(HEADINGS.values())
    for kind, heading in HEADINGS.items():
        assert list(found[heading]) == sorted(registry.components[kind])
        for name, (origin, summary, *_) in found[heading].items():
            part = registry.components[kind][name]
            assert origin == f"{part.origin} {importlib.metadata.version(part.origin)}"
            assert summary == inspect.getdoc(part.value).splitlines()[0]
    assert set(found.get("Targets", {})) == set(registry.targets)


@pytest.mark.parametrize("kind", HEADINGS)
def test_every_option_is_listed_with_type_and_default(kind, alone):
    # Without the texts that come with a kind, to compare whole lines.
    found = listed()[HEADINGS[kind]]
    for name, part in alone.components[kind].items():
        expected = [
            option_line(field, get_type_hints(options)[field.name], where)
            for options, where in option_classes(kind, part.value)
            for field in attrs.fields(options)
        ]
        assert found[name][2:] == expected, name


def test_the_whole_text_of_a_kind(alone):
    parts = {
        name.replace("-", "_"): inspect.getdoc(part.value).splitlines()[0]
        for name, part in alone.components["selector"].items()
    }
    expected = SELECTORS.format(version=importlib.metadata.version("treeflash"), **parts)
    assert expected in invoke().stdout


OPTIONS = {
    f"{kind} {name}.{field.name}{where}": (options, field.name)
    for kind in HEADINGS
    for name, component in getattr(builtin, HOOKS.get(kind, f"treeflash_{kind}s"))().items()
    for options, where in option_classes(kind, component)
    for field in attrs.fields(options)
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_built_in_option_says_what_it_means(option):
    options, name = OPTIONS[option]
    (row,) = [row for row in option_rows(options) if row.name == name]
    assert len(row.text.split()) > 1
    # One option's text does not run into the next one's.
    assert not re.search(rf"\b({'|'.join(field.name for field in attrs.fields(options))}): ", row.text)


@pytest.mark.parametrize("kind", HEADINGS)
def test_a_kind_is_listed_alone_and_says_what_each_option_means(kind, alone):
    found = listed(kind)
    assert list(found) == [HEADINGS[kind]]
    for name, part in alone.components[kind].items():
        rows = [row for options, _ in option_classes(kind, part.value) for row in option_rows(options)]
        lines = found[HEADINGS[kind]][name][2:]
        assert len(lines) == len(rows)
        for line, row in zip(lines, rows, strict=True):
            head, _, text = line.partition("  ")
            assert head.startswith(f"{row.name}: {row.kind}")
            assert text == row.text


def test_a_plugins_part_is_listed_with_its_own_version(install):
    install(
        "acme-trees",
        """
import attrs
from treeflash.components.selectors.chain import Chain

@attrs.frozen
class Acme(Chain):
    '''Chooses as Acme does.

    Attributes:
        width: How wide.
        eager: Whether at once,
            or later.

            Rather at once.
        name: Of the choice.
    '''
    width: int = 3
    eager: bool = True
    name: str = "wide"

@hookimpl
def treeflash_selectors():
    return {"acme": Acme}

@hookimpl
def treeflash_targets():
    return {"acme-model": lambda: None}
""",
    )
    found = listed()
    assert found["Selectors"]["acme"] == [
        "acme-trees 2.5",
        "Chooses as Acme does.",
        "budget: an integer",
        "width: an integer = 3",
        "eager: true or false = true",
        'name: a string = "wide"',
    ]
    assert found["Targets"] == {"acme-model": ["acme-trees 2.5"]}
    assert listed("target") == {"Targets": found["Targets"]}
    # What the class does not say again, the one below it says.
    assert listed("selector")["Selectors"]["acme"][2:] == [
        "budget: an integer  Draft nodes, the root excluded; as many as the drafter gives when not set.",
        "width: an integer = 3  How wide.",
        "eager: true or false = true  Whether at once, or later. Rather at once.",
        'name: a string = "wide"  Of the choice.',
    ]


ODD_OPTIONS = """
import attrs
from treeflash.components.selectors.chain import Chain

@attrs.frozen
class Inner:
    depth: int = 1
    width: int | None = None

@attrs.frozen
class Acme(Chain):
    names: list[str] = attrs.Factory(list)
    inner: Inner = attrs.Factory(Inner)

class Bare(Chain):
    Options = int

@hookimpl
def treeflash_selectors():
    return {"acme": Acme, "bare": Bare}
"""


def test_defaults_that_are_made_are_shown_as_a_recipe_would_write_them(install):
    install("acme-trees", ODD_OPTIONS.replace(', "bare": Bare', ""))
    names, inner = listed()["Selectors"]["acme"][3:]
    assert names == "names: a list (a string each) = []"
    head, _, default = inner.partition(" = ")
    assert head == "inner: a table"
    assert tomllib.loads(f"inner = {default}") == {"inner": {"depth": 1}}


def test_a_part_whose_options_cannot_be_read_spoils_nothing(install):
    install("acme-trees", ODD_OPTIONS)
    assert "bare" in invoke().stdout


def test_a_lossy_verifier_is_marked(monkeypatch):
    monkeypatch.setattr(SdpaTree, "lossless", False)
    assert "  (lossy)  Walks from the root" in invoke("verifier").stdout


def test_without_targets_by_name_it_says_what_else_is_taken(monkeypatch):
    monkeypatch.setenv("TREEFLASH_PLUGINS", "")
    assert "folders and hub names" in invoke("target").stdout
    assert "Targets" not in invoke().stdout


@pytest.mark.parametrize("kind", [None, *HEADINGS, "target"])
def test_a_failing_plugin_is_named_on_the_error_stream_and_the_rest_is_listed(kind, install, alone):
    install("broken-trees", "raise RuntimeError('out of luck')")
    result = invoke(*([kind] if kind else []))
    assert result.stderr == (
        "treeflash: plugin broken-trees failed: entry point plugin: RuntimeError: out of luck\n"
    )
    assert "broken-trees" not in result.stdout
    for name in {HEADINGS.get(kind), *([] if kind else HEADINGS.values())} - {None}:
        assert name in result.stdout


def test_an_unknown_kind_is_a_mistake_and_the_kinds_are_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["treeflash", "components", "drafters"])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert "found 'drafters'; did you mean 'drafter'?" in err
    for kind in [*HEADINGS, "target"]:
        assert kind in err
    assert "Traceback" not in err
