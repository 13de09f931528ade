"""How files and overrides are laid over one another."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.errors import RecipeError, TreeflashError, UnknownNameError
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.recipe_tables import find, merge, parse_overrides
from treeflash.training.training_recipe import TrainingRecipe


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_extends_by_name(write, registry):
    path = write("mine.toml", 'extends = "tiny-treeflash"\n[selector]\nbudget = 4\n')
    recipe = Recipe.load(path, registry)
    assert recipe.path == path
    assert recipe.parts["selector"].options == OptTree(budget=4)
    assert recipe.parts["refiner"].use == "swiglu"


def test_naming_the_default_again_keeps_what_the_base_says(write, registry):
    write("base.toml", 'extends = "tiny-plain"\n[selector]\nbudget = 5\n')
    path = write("mine.toml", 'extends = "base.toml"\n[selector]\nuse = "opt-tree"\nbeam = 2\n')
    assert Recipe.load(path, registry).parts["selector"].options == OptTree(budget=5, beam=2)


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path, registry):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "tiny-plain"\n', encoding="utf-8-sig")
    assert Recipe.load(path, registry).parts["drafter"].use == "none"


def test_extends_by_path_relative_to_the_file(write, registry, monkeypatch, tmp_path):
    write("base.toml", 'extends = "tiny-ddtree"\n[selector]\nbudget = 5\n')
    path = write("sub/mine.toml", 'extends = "../base.toml"\n[selector]\nbeam = 2\n')
    monkeypatch.chdir(tmp_path / "sub")
    assert Recipe.load(path, registry).parts["selector"].options == OptTree(budget=5, beam=2)


def test_extends_through_several_files(write, registry):
    write("a.toml", 'extends = "tiny-ddtree"\n[selector]\nbudget = 1\nbeam = 1\n')
    write("b.toml", 'extends = "a.toml"\n[selector]\nbudget = 2\n')
    path = write("c.toml", 'extends = "b.toml"\n[drafter]\ntemperature = 2\n')
    parts = Recipe.load(path, registry).parts
    assert parts["selector"].options == OptTree(budget=2, beam=1)
    assert parts["drafter"].options.temperature == 2.0


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_circle_of_bases_is_refused(length, write, registry):
    for index in range(length):
        write(f"r{index}.toml", f'extends = "r{(index + 1) % length}.toml"\n')
    path = write("r0.toml", f'extends = "r{1 % length}.toml"\n')
    with pytest.raises(RecipeError) as error:
        Recipe.load(path, registry)
    way = " -> ".join(f"r{index % length}.toml" for index in range(length + 1))
    assert f"extends itself ({way})" in str(error.value)


def test_a_circle_of_differently_spelled_paths_is_refused(write, registry):
    path = write("a.toml", 'extends = "./sub/../a.toml"\n')
    (path.parent / "sub").mkdir()
    with pytest.raises(RecipeError, match="extends itself"):
        Recipe.load(path, registry)


@pytest.mark.parametrize(
    ("base", "parts"),
    [
        ('"tiny-treeflsh"', ["tiny-treeflsh", "did you mean 'tiny-treeflash'"]),
        ('"nowhere.toml"', ["nowhere.toml"]),
        ("3", ["expected a recipe's name", "found 3"]),
        ('["tiny-plain"]', ["expected a recipe's name"]),
    ],
)
def test_a_missing_base_names_the_file_that_wants_it(base, parts, write, registry):
    path = write("mine.toml", f"extends = {base}\n")
    with pytest.raises(RecipeError) as error:
        Recipe.load(path, registry)
    message = str(error.value)
    assert message.startswith(f"{path}: extends: ")
    for part in parts:
        assert part in message


def test_a_broken_base_is_named_itself(write, registry):
    base = write("base.toml", "[target\n")
    path = write("mine.toml", 'extends = "base.toml"\n')
    with pytest.raises(RecipeError, match="not valid TOML") as error:
        Recipe.load(path, registry)
    assert str(base) in str(error.value)


@pytest.mark.parametrize(("name", "near"), [("nowhere", ""), ("tiny-plane", "; did you mean 'tiny-plain'?")])
def test_an_unknown_name_says_where_the_known_ones_are(name, near, registry):
    with pytest.raises(UnknownNameError) as error:
        Recipe.load(name, registry)
    assert str(error.value) == f"no recipe is called '{name}'{near} (treeflash recipes list names all)"


def test_a_missing_file_is_named(tmp_path, registry):
    for name in (tmp_path / "nowhere.toml", str(tmp_path / "nowhere.toml")):
        with pytest.raises(UnknownNameError, match=r"no recipe file .*nowhere\.toml"):
            Recipe.load(name, registry)
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UnknownNameError, match=r"no recipe file .*folder\.toml"):
        Recipe.load(tmp_path / "folder.toml", registry)


def test_keys_are_merged_one_by_one():
    base = {"selector": {"use": "opt-tree", "budget": 15, "beam": 3}, "drafter": {"use": "none"}}
    merged = merge(base, {"selector": {"budget": 4}})
    assert merged == {
        "selector": {"use": "opt-tree", "budget": 4, "beam": 3},
        "drafter": {"use": "none"},
    }


def test_naming_the_same_component_keeps_its_options():
    base = {"selector": {"use": "opt-tree", "budget": 15}}
    merged = merge(base, {"selector": {"use": "opt-tree", "beam": 3}})
    assert merged == {"selector": {"use": "opt-tree", "budget": 15, "beam": 3}}


def test_naming_another_component_drops_the_options_below():
    base = {"selector": {"use": "opt-tree", "budget": 15, "beam": 3}}
    assert merge(base, {"selector": {"use": "chain"}}) == {"selector": {"use": "chain"}}
    assert merge(base, {"selector": {"use": "chain", "budget": 2}}) == {
        "selector": {"use": "chain", "budget": 2}
    }


def test_another_component_in_a_file(write, registry):
    path = write("mine.toml", 'extends = "tiny-ddtree"\n[selector]\nuse = "chain"\n')
    assert Recipe.load(path, registry).parts["selector"].options == Chain(budget=None)


TABLES = st.dictionaries(
    st.sampled_from(["target", "selector", "drafter"]),
    st.dictionaries(st.sampled_from(["use", "budget", "beam"]), st.sampled_from(["a", "b"]), max_size=3),
    max_size=3,
)


@given(base=TABLES, over=TABLES)
def test_what_is_laid_over_always_shows(base, over):
    before = str((base, over))
    merged = merge(base, over)
    assert str((base, over)) == before
    assert set(merged) == set(base) | set(over)
    for table, values in over.items():
        assert values.items() <= merged[table].items()
    for table in set(base) - set(over):
        assert merged[table] == base[table]
    assert merge(merged, over) == merged


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("selector.budget=31", 31),
        ("selector.budget = 31", 31),
        ("selector.budget=-1", -1),
        ("selector.budget=1e-4", 1e-4),
        ("selector.budget=1.0", 1.0),
        ("selector.budget=true", True),
        ("selector.budget=True", "True"),
        ('selector.budget="31"', "31"),
        ("selector.budget='31'", "31"),
        ("selector.budget=[1, 2]", [1, 2]),
        ("selector.budget=opt-tree", "opt-tree"),
        ("selector.budget=Qwen/Qwen3-4B", "Qwen/Qwen3-4B"),
        ("selector.budget=pack.age:models/tiny", "pack.age:models/tiny"),
        ("selector.budget=a=b", "a=b"),
        ("selector.budget=two words", "two words"),
        ("selector.budget=", ""),
    ],
)
def test_overrides_are_typed_as_in_toml(assignment, value):
    parsed = parse_overrides([assignment])
    assert parsed == {"selector": {"budget": value}}
    assert type(parsed["selector"]["budget"]) is type(value)


def test_overrides_are_collected_by_table():
    assignments = ["selector.budget=3", "target.dtype=float64", "selector.beam=2", "selector.budget=4"]
    assert parse_overrides(assignments) == {
        "selector": {"budget": 4, "beam": 2},
        "target": {"dtype": "float64"},
    }
    assert parse_overrides([]) == {}


def test_every_malformed_override_is_listed():
    wrong = ["selector", "selector.budget", "budget=3", ".budget=3", "selector.=3", "=3", ""]
    with pytest.raises(RecipeError) as error:
        parse_overrides(["selector.budget=3", *wrong])
    message = str(error.value)
    assert "7 faults" in message
    for assignment in wrong:
        assert f"expected table.key=value, found {assignment!r}" in message


@given(st.sampled_from(["", "a.b="]), st.text("ab.=,[]{}\"'#\\\n\r\t 01-:eT", max_size=20))
def test_any_override_is_read_or_refused(start, text):
    try:
        (values,) = parse_overrides([start + text]).values()
    except RecipeError:
        return
    assert len(values) == 1


@given(st.one_of(st.integers(), st.booleans(), st.floats(allow_nan=False)))
def test_numbers_keep_value_and_type(value):
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    found = parse_overrides([f"selector.key={text}"])["selector"]["key"]
    assert type(found) is type(value)
    assert found == value


def test_overrides_are_laid_over_the_file(registry):
    recipe = Recipe.load("tiny-ddtree", registry, {"selector": {"use": "chain", "budget": 2}})
    assert recipe.parts["selector"].options == Chain(budget=2)


def test_faults_in_overrides_are_reported_like_the_files(registry):
    overrides = {"selector": {"budgt": 2}, "drafter": {"temperature": "warm"}}
    with pytest.raises(RecipeError) as error:
        Recipe.load("tiny-ddtree", registry, overrides)
    assert "selector.budgt: unknown key" in str(error.value)
    assert "drafter.temperature: expected a number, found 'warm'" in str(error.value)
    assert "tiny-ddtree.toml (selector.budgt, drafter.temperature overridden): 2 faults" in str(error.value)


def test_what_is_not_to_be_had_is_blamed_on_overrides_too(registry, tmp_path):
    model = {"target": {"model": str(tmp_path / "nowhere")}}
    for name, load in (("tiny-plain", Recipe.load), ("tiny-train", TrainingRecipe.load)):
        assert load(name, registry, model).name == f"{find(name, registry)} (target.model overridden)"
        assert load(name, registry).name == str(find(name, registry))
    with pytest.raises(TreeflashError, match=r"tiny-plain.toml \(target.model overridden\): target.model: "):
        Recipe.load("tiny-plain", registry, model).build(registry)


def test_options_of_a_default_component_can_be_set_alone(registry):
    recipe = Recipe.load("tiny-plain", registry, {"selector": {"budget": 3}})
    assert recipe.parts["selector"].options == OptTree(budget=3)
