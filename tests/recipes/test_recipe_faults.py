"""What is wrong with a recipe: all of it, each fault with file, key, expected, found and nearest."""

import attrs
import pytest
from attrs.validators import matches_re

from treeflash.errors import RecipeError
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.recipe_tables import parse_overrides
from treeflash.structuring import structure


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


@pytest.fixture
def refusal(tmp_path, registry):
    """Writes a recipe and returns the one message it is refused with."""

    def refuse(text) -> str:
        path = tmp_path / "mine.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(RecipeError) as error:
            Recipe.load(path, registry)
        message = str(error.value)
        assert message.startswith(str(path))
        return message.removeprefix(str(path))

    return refuse


TREE = 'extends = "tiny-treeflash"\n'
FAULTS = {
    "misspelled key": (
        f"{TREE}[selector]\nbudgt = 3",
        ["selector.budgt: unknown key", "did you mean 'budget'", "known: beam, budget"],
    ),
    "misspelled target key": (f"{TREE}[target]\ndtyp = 'x'", ["target.dtyp: unknown key", "'dtype'"]),
    "string for int": (
        f"{TREE}[selector]\nbudget = '3'",
        ["selector.budget: expected an integer, found '3'"],
    ),
    "bool for int": (
        f"{TREE}[selector]\nbudget = true",
        ["selector.budget: expected an integer, found True"],
    ),
    "float for int": (f"{TREE}[selector]\nbudget = 3.0", ["selector.budget: expected an integer, found 3.0"]),
    "float for optional int": (f"{TREE}[selector]\nbeam = 3.5", ["selector.beam: expected an integer"]),
    "list for int": (f"{TREE}[selector]\nbudget = [3]", ["selector.budget: expected an integer, found [3]"]),
    "table for int": (f"{TREE}[selector.budget]\nx = 3", ["selector.budget: expected an integer, found {"]),
    "int for str": (f"{TREE}[drafter]\ncheckpoint = 3", ["drafter.checkpoint: expected a string, found 3"]),
    "int for optional str": (f"{TREE}[refiner]\ncheckpoint = 3", ["refiner.checkpoint: expected a string"]),
    "string for float": (
        f"{TREE}[drafter]\ntemperature = '1'",
        ["drafter.temperature: expected a number, found '1'"],
    ),
    "bool for float": (f"{TREE}[drafter]\ntemperature = true", ["drafter.temperature: expected a number"]),
    "int for use": (f"{TREE}[selector]\nuse = 3", ["selector.use: expected a name, found 3", "opt-tree"]),
    "no use": (
        "[target]\nmodel = 'x'\n[drafter]\ncheckpoint = 'x'",
        ["drafter.use", "found nothing", "dflash"],
    ),
    "unknown component": (
        f"{TREE}[selector]\nuse = 'opt-tre'",
        ["selector.use: no selector is called 'opt-tre'", "did you mean 'opt-tree'", "known: "],
    ),
    "component of another kind": (f"{TREE}[selector]\nuse = 'top-m'", ["no selector is called 'top-m'"]),
    "unknown table": (
        f"{TREE}[buildr]\nuse = 'top-m'",
        ["unknown table [buildr]", "did you mean 'builder'", "known: "],
    ),
    "key outside of tables": (f"budget = 3\n{TREE}", ["budget: expected it inside a table"]),
    "value for table": (f"selector = 'opt-tree'\n{TREE}", ["selector: expected a table, found 'opt-tree'"]),
    "list of tables": (f"{TREE}[[selector]]\nuse = 'chain'", ["selector: expected a table"]),
    "no target": ("[drafter]\nuse = 'none'", ["target.model: expected a string, found nothing"]),
    "no drafter": ("[target]\nmodel = 'x'", ["[drafter]", 'use = "none"']),
    "nothing": ("", ["target.model", "[drafter]"]),
    "missing option": (
        "[target]\nmodel = 'x'\n[drafter]\nuse = 'dflash'",
        ["drafter.checkpoint: expected a str"],
    ),
    "branching 0": (f"{TREE}[builder]\nbranching = 0", ["builder", "branching", ">= 1", "0"]),
    "budget -1": (f"{TREE}[selector]\nbudget = -1", ["selector", "budget", ">= 0", "-1"]),
    "temperature 0": (f"{TREE}[drafter]\ntemperature = 0", ["drafter", "temperature", "> 0"]),
    "temperature nan": (f"{TREE}[drafter]\ntemperature = nan", ["drafter", "temperature", "> 0"]),
    "builder and refiner behind no drafter": (
        f"{TREE}[drafter]\nuse = 'none'",
        ["builder.use: expected none", "refiner.use: expected none", "2 faults"],
    ),
    "refiner behind no drafter": (
        "extends = 'tiny-plain'\n[refiner]\nuse = 'swiglu'",
        ["gives no hidden states", "refiner.use: expected none", "found 'swiglu'"],
    ),
    "nothing behind a drafter of blocks": (
        "extends = 'tiny-plain'\n[drafter]\nuse = 'dflash'\ncheckpoint = 'x'",
        ["builder.use: expected one", "refiner.use: expected one", "known: frontier", "2 faults"],
    ),
    "refiner that looks further than the builder": (
        f"{TREE}[builder]\nuse = 'marginal'",
        ["builder.use: expected contexts of 1 token", "'marginal', which lays out contexts of 0"],
    ),
    "two-token refiner over marginals": (
        f"{TREE}[builder]\nuse = 'marginal'\n[refiner]\nuse = 'two-token'",
        ["builder.use: expected contexts of 2 tokens, which refiner 'two-token'"],
    ),
    "no TOML": ("[target\nmodel = 'x'", ["not valid TOML", "line 1"]),
    "a key twice": ("[target]\nmodel = 'x'\nmodel = 'y'", ["not valid TOML"]),
    "no UTF-8": (b"[target]\nmodel = '\xff'\n", ["not valid TOML"]),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault(case, refusal):
    text, parts = FAULTS[case]
    message = refusal(text)
    for part in parts:
        assert part in message


def test_faults_of_all_tables_are_listed_together(refusal):
    message = refusal(
        """
        extends = "tiny-treeflash"
        [target]
        dtype = 16
        devise = "cpu"
        [drafter]
        temperature = "warm"
        checkpont = "x"
        [builder]
        branching = 0
        [refiner]
        use = "swigloo"
        [selector]
        budget = 1.5
        beem = 1
        [verifier]
        use = "sdpa-tree"
        strict = true
        """
    )
    assert "9 faults" in message.splitlines()[0]
    lines = message.splitlines()[1:]
    assert len(lines) == 9
    expected = [
        "target.dtype: expected a string, found 16",
        "target.devise: unknown key; did you mean 'device'?",
        "drafter.temperature: expected a number, found 'warm'",
        "drafter.checkpont: unknown key; did you mean 'checkpoint'?",
        "branching",
        "refiner.use: no refiner is called 'swigloo'; did you mean 'swiglu'?",
        "selector.budget: expected an integer, found 1.5",
        "selector.beem: unknown key; did you mean 'beam'?",
        "verifier.strict: unknown key",
    ]
    for part in expected:
        assert sum(part in line for line in lines) == 1, part


def test_an_int_stands_for_a_float(tmp_path, registry):
    path = tmp_path / "mine.toml"
    path.write_text(f"{TREE}[drafter]\ntemperature = 2\n")
    temperature = Recipe.load(path, registry).parts["drafter"].options.temperature
    assert temperature == 2.0
    assert isinstance(temperature, float)


def test_checking_touches_no_model(tmp_path, registry):
    path = tmp_path / "mine.toml"
    path.write_text(f"{TREE}[target]\nmodel = 'no/where'\n[drafter]\ncheckpoint = 'no-where'\n")
    assert Recipe.load(path, registry).target.model == "no/where"


def test_faults_are_also_value_errors(tmp_path, registry):
    path = tmp_path / "mine.toml"
    path.write_text("")
    with pytest.raises(ValueError, match=r"mine\.toml"):
        Recipe.load(path, registry)


def test_an_unknown_table_hides_no_other_fault(refusal):
    message = refusal(f"{TREE}[buildr]\nuse = 'top-m'\n[selector]\nbudgt = 3")
    assert "[buildr]" in message
    assert "selector.budgt" in message


def test_a_misfit_hides_behind_no_other_fault(refusal):
    message = refusal(
        "extends = 'tiny-plain'\n[refiner]\nuse = 'swiglu'\n[selector]\nuse = 'chain'\nbudgt = 3"
    )
    assert "selector.budgt" in message
    assert "refiner.use: expected none" in message


def test_every_value_out_of_range_is_listed(refusal):
    message = refusal(f"{TREE}[builder]\nbranching = 0\nchildren = 0")
    assert "branching" in message
    assert "children" in message


def test_a_value_out_of_range_hides_behind_no_other_fault(refusal):
    message = refusal(f"{TREE}[builder]\nbranching = 0\nchildren = 'many'")
    assert "branching" in message
    assert "children" in message


def test_a_value_out_of_range_is_worded_like_other_faults(refusal):
    assert "builder.branching: expected" in refusal(f"{TREE}[builder]\nbranching = 0")


@attrs.frozen
class Inner:
    depth: int = 1


@attrs.frozen
class Options:
    """Kinds of option that a plugin may have and no built-in part has."""

    flag: bool = False
    names: list[str] = attrs.Factory(list)
    layers: tuple[int, ...] = ()
    inner: Inner = attrs.Factory(Inner)
    name: str = attrs.field(default="a", validator=matches_re("[a-z]+"))


def faults_of(table, options=Options):
    faults = []
    assert structure(table, options, "selector", faults) is None
    return faults


def test_other_kinds_of_option_are_read():
    table = {"flag": True, "names": ["a"], "layers": [1, 2], "inner": {"depth": 3}}
    faults = []
    assert structure(table, Options, "selector", faults) == Options(True, ["a"], (1, 2), Inner(3))
    assert faults == []


@pytest.mark.parametrize(
    "table", [{"flag": 1}, {"flag": "true"}, {"names": [1]}, {"layers": ["1"]}, {"layers": 3}, {"inner": 3}]
)
def test_other_kinds_of_option_are_checked(table):
    (key,) = table
    (fault,) = faults_of(table)
    assert fault.startswith(f"selector.{key}: ")


def test_a_validator_that_words_its_own_error_is_quoted():
    (fault,) = faults_of({"name": "A1"})
    assert fault.startswith("selector.name: 'name' must match regex '[a-z]+' ('A1' doesn't)")


def test_a_string_is_no_list_of_strings():
    assert "expected" in faults_of({"names": "abc"})[0]


@pytest.mark.parametrize("table", [{"inner": {"depht": 3}}, {"inner": {"depth": "3"}}])
def test_faults_in_a_nested_table_name_the_inner_key(table):
    (key,) = table["inner"]
    assert key in faults_of(table)[0]


@pytest.mark.parametrize("value", ["[" * 5000, "9" * 5000])
def test_what_toml_gives_up_on_is_one_error(value, tmp_path):
    registry, path = Registry.load(), tmp_path / "mine.toml"
    path.write_text(f'extends = "tiny-plain"\n[selector]\nbudget = {value}\n')
    with pytest.raises(RecipeError, match="not valid TOML"):
        Recipe.load(path, registry)
    if value.isdigit():
        with pytest.raises(RecipeError, match=r"selector\.budget: cannot be read"):
            parse_overrides([f"selector.budget={value}"])
