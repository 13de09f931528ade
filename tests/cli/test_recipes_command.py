"""`treeflash recipes`: which there are, what one says and from which file, and whether they are right."""

import re
import shutil
import sys
import tomllib

import attrs
import pytest
from click.testing import CliRunner

from treeflash.cli import commands, main
from treeflash.engine import Decoder
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.training.training_recipe import TrainingRecipe

NAMES = sorted(Registry.load().recipes)
# A value, and behind it the file that says so. Texts may hold a "#" themselves.
VALUE = re.compile(r"(?P<key>\S+) = (?P<value>.*\S) +# (?P<origin>\S+)")
TINY = "treeflash.testing:models/tiny-target"


def invoke(*arguments):
    return CliRunner().invoke(commands, ["recipes", *map(str, arguments)], catch_exceptions=False)


def shown(recipe, *options):
    """The output, and by table and key a value and where it is from."""
    result = invoke("show", recipe, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    found, table = {}, ""
    for line in result.stdout.splitlines():
        match = VALUE.fullmatch(line)
        if line.startswith("["):
            table = line.strip("[]")
        elif match:
            value = tomllib.loads(f"value = {match['value']}")["value"]
            found[table, match["key"]] = (value, match["origin"])
    return result.stdout, found


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def run(monkeypatch, capsys):
    """Exit status and both outputs, as a user sees them."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["treeflash", "recipes", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return stop.value.code, out, err

    return run


@pytest.fixture
def three_levels(write):
    """Recipes above a shipped one, each of which says something new and something else."""
    write(
        "first.toml",
        'extends = "tiny-ddtree"\n[selector]\nbudget = 9\nbeam = 4\n[target]\ndtype = "float64"\n',
    )
    write("second.toml", 'extends = "first.toml"\n[selector]\nbudget = 5\n[drafter]\ntemperature = 2\n')
    return write("third.toml", 'extends = "second.toml"\n[builder]\nuse = "top-m"\nchildren = 3\n')


def test_list_names_all_with_their_first_sentence():
    result = invoke("list")
    lines = result.stdout.splitlines()
    recipes = Registry.load().recipes
    names = [line.split()[0] for line in lines]
    # Ablations come last.
    assert names == sorted(NAMES, key=lambda name: (name.startswith("ablation-"), name))
    for line, recipe in zip(lines, map(recipes.get, names), strict=True):
        comment = recipe.value.read_text(encoding="utf-8").partition("\n[")[0].partition("\nextends")[0]
        assert comment.startswith("# ")
        sentence = comment.replace("\n#", "")[2:].split(". ")[0].rstrip(".\n")
        origin, text = line.split("  [", 1)[1].split("]  ", 1)
        marks = re.fullmatch(r"(?:\((?P<marks>[a-z, ]+)\) )?(?P<text>.*)", text)
        assert (origin, marks["text"]) == (recipe.origin, f"{sentence}.")
        trains = "[train]" in recipe.value.read_text(encoding="utf-8") or "ablation" in recipe.value.stem
        assert ("trains" in (marks["marks"] or "")) == trains
        # The tiny models come with the packages; n-grams have no model of their own.
        local = recipe.value.stem.startswith(("tiny-", "ngram"))
        assert ("downloads" in (marks["marks"] or "")) == (not local)
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Installs a plugin that has recipes, each a file of these bytes."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TREEFLASH_PLUGINS", "acme-recipes")

    def plugin(**recipes):
        (tmp_path / "acme").mkdir()
        for name, content in recipes.items():
            (tmp_path / "acme" / f"{name}.toml").write_bytes(content)
        source = f"@hookimpl\ndef treeflash_recipes():\n    return {str(tmp_path / 'acme')!r}\n"
        (tmp_path / "acme_recipes.py").write_text(f"from treeflash.hookspecs import hookimpl\n{source}")
        info = tmp_path / "acme_recipes-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-recipes\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[treeflash]\nacme = acme_recipes\n")

    yield plugin
    sys.modules.pop("acme_recipes", None)


def test_list_has_a_line_for_recipes_that_say_nothing_of_themselves(plugin):
    plugin(empty=b"", silent=b"[target]\n", odd=b"# \xff\n")
    lines = {line.split()[0]: line.rstrip() for line in invoke("list").stdout.splitlines()}
    for name in ("empty", "silent"):
        assert re.fullmatch(rf"{name} +\[acme-recipes\]", lines[name])
    assert "[acme-recipes]" in lines["odd"]
    assert "tiny-plain" in lines


def test_show_says_every_value_and_the_file_that_says_so(three_levels):
    _, found = shown(three_levels)
    assert found == {
        ("target", "model"): (TINY, "tiny-plain.toml"),
        ("target", "dtype"): ("float64", "first.toml"),
        ("target", "device"): ("auto", "default"),
        ("target", "lean"): (True, "default"),
        ("target", "compile"): (False, "default"),
        ("target", "trust_remote_code"): (False, "default"),
        ("drafter", "use"): ("dflash", "tiny-dflash.toml"),
        ("drafter", "checkpoint"): ("treeflash.testing:models/tiny-treeflash", "tiny-dflash.toml"),
        ("drafter", "temperature"): (2, "second.toml"),
        ("drafter", "shortlist"): (True, "default"),
        ("builder", "use"): ("top-m", "third.toml"),
        ("builder", "least"): (0.0, "default"),
        ("builder", "children"): (3, "third.toml"),
        ("builder", "branching"): (16, "default"),
        ("refiner", "use"): ("none", "tiny-dflash.toml"),
        ("selector", "use"): ("opt-tree", "tiny-ddtree.toml"),
        ("selector", "budget"): (5, "second.toml"),
        ("selector", "beam"): (4, "first.toml"),
        ("verifier", "use"): ("sdpa-tree", "default"),
    }


def test_show_and_check_lay_options_over_the_recipe(run):
    _, found = shown("tiny-treeflash", "-o", "selector.budget=5", "-o", "refiner.use=none")
    assert found["selector", "budget"] == (5, "-o")
    assert found["refiner", "use"] == ("none", "-o")
    assert found["drafter", "use"] == ("dflash", "tiny-dflash.toml")
    assert run("check", "tiny-treeflash", "-o", "selector.budget=5")[0] == 0
    status, out, _ = run("check", "tiny-treeflash", "-o", "selector.bugdet=5")
    assert (status, "did you mean 'budget'" in out) == (2, True)


def test_show_tells_files_of_one_name_apart(write):
    below = write("base/mine.toml", 'extends = "tiny-plain"\n[target]\ndtype = "float64"\n')
    above = write("mine.toml", 'extends = "base/mine.toml"\n[target]\ndevice = "cpu"\n')
    _, found = shown(above)
    assert found["target", "dtype"] == ("float64", str(below))
    assert found["target", "device"] == ("cpu", str(above))


def test_show_begins_with_the_files_from_the_lowest_up(three_levels):
    lines = shown(three_levels)[0].splitlines()
    files = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    names = ["tiny-plain", "tiny-dflash", "tiny-ddtree", "first", "second", "third"]
    assert [file.rsplit("/", 1)[1] for file in files] == [f"{name}.toml" for name in names]
    assert files[-1] == str(three_levels)


def test_another_component_drops_the_values_below(write, three_levels):
    path = write("fourth.toml", 'extends = "third.toml"\n[selector]\nuse = "chain"\n')
    _, found = shown(path)
    assert {key: value for key, value in found.items() if key[0] == "selector"} == {
        ("selector", "use"): ("chain", "fourth.toml")
    }
    fifth = write("fifth.toml", 'extends = "fourth.toml"\n[selector]\nuse = "opt-tree"\nbeam = 2\n')
    assert shown(fifth)[1]["selector", "budget"] == (63, "default")
    assert shown(fifth)[1]["selector", "beam"] == (2, "fifth.toml")


def test_a_default_that_a_file_says_too_is_the_files(write):
    path = write(
        "mine.toml", 'extends = "tiny-plain"\n[target]\ndtype = "auto"\n[verifier]\nuse = "sdpa-tree"\n'
    )
    found = shown(path)[1]
    assert found["target", "dtype"] == ("auto", "mine.toml")
    assert found["verifier", "use"] == ("sdpa-tree", "mine.toml")
    assert found["selector", "use"] == ("opt-tree", "default")


def assert_loads_to_the_same(recipe, folder):
    """What is shown, saved as a file elsewhere, is the same recipe."""
    registry, (text, _) = Registry.load(), shown(recipe)
    copy = folder / "elsewhere" / "copy.toml"
    copy.parent.mkdir()
    copy.write_text(text, encoding="utf-8")
    kind = TrainingRecipe if "train" in tomllib.loads(text) else Recipe
    original, again = kind.load(recipe, registry), kind.load(copy, registry)
    # What a training recipe says is kept for the record, the defaults that are shown among it.
    where = "tables" if kind is TrainingRecipe else "path"
    expected = {where: getattr(original, where)}
    assert attrs.evolve(again, **expected) == original


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_is_the_same_recipe(name, tmp_path):
    assert_loads_to_the_same(name, tmp_path)


def test_what_is_shown_of_three_levels_is_the_same_recipe(three_levels, tmp_path):
    assert_loads_to_the_same(three_levels, tmp_path)


@pytest.mark.parametrize(
    "value", [r"'C:\models\new'", """'a "quoted" one'""", '"a # b"', '"two\\nlines"', '"Größe"', '"o\'clock"']
)
def test_any_text_is_shown_as_it_is_written(value, write, tmp_path):
    path = write("mine.toml", f'extends = "tiny-plain"\n[target]\nmodel = {value}\n')
    assert_loads_to_the_same(path, tmp_path)


def test_a_folder_beside_the_recipe_is_shown_with_its_whole_path(write, tmp_path, models):
    shutil.copytree(models / "tiny-treeflash", tmp_path / "mine" / "weights")
    path = write("mine/r.toml", 'extends = "tiny-treeflash"\n[drafter]\ncheckpoint = "weights"\n')
    assert shown(path)[1]["drafter", "checkpoint"] == (str(tmp_path / "mine" / "weights"), "r.toml")
    assert_loads_to_the_same(path, tmp_path)


def test_a_training_recipe_is_shown(write, tmp_path):
    path = write("mine.toml", 'extends = "tiny-train"\n[train]\nsteps = 5\n[loss]\nuse = "total-variation"\n')
    found = shown(path)[1]
    assert found["train", "steps"] == (5, "mine.toml")
    assert found["train", "save_every"] == (100, "tiny-train.toml")
    assert found["loss", "use"] == ("total-variation", "mine.toml")
    assert found["drafter", "target_layer_ids"] == ([0, 1, 2, 3], "tiny-train.toml")
    assert found["optimizer", "lr"] == (2e-3, "tiny-train.toml")
    assert_loads_to_the_same(path, tmp_path)


BROKEN = {
    "misspelled name": ("tiny-treflash", "treeflash: no recipe is called 'tiny-treflash'; did you mean"),
    "missing file": ("nowhere.toml", "treeflash: no recipe file nowhere.toml"),
    "no TOML": ("[target", "not valid TOML"),
    "unknown base": ('extends = "tiny-plane"', "extends: no recipe is called 'tiny-plane'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_read_cannot_be_shown(case, run, write, tmp_path, monkeypatch):
    text, fault = BROKEN[case]
    monkeypatch.chdir(tmp_path)
    recipe = text if case in ("misspelled name", "missing file") else write("mine.toml", text)
    status, out, err = run("show", recipe)
    assert (status, out) == (2, "")
    assert fault in err
    assert err.startswith("treeflash: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("text", ["train = 3", "[train]", "selector = 3", "budget = 3", ""])
def test_a_recipe_of_odd_tables_is_shown_or_refused(text, run, write):
    status, _, err = run("show", write("mine.toml", text))
    assert status in (0, 2)
    assert (err == "") == (status == 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_right_recipe(name):
    result = invoke("check", name)
    assert (result.exit_code, result.output) == (0, f"{name}: right\n")


def test_check_looks_at_all_that_are_found_by_name():
    result = invoke("check")
    assert (result.exit_code, result.output) == (0, "".join(f"{name}: right\n" for name in NAMES))


def test_check_finds_all_faults_of_all_recipes(write, run):
    two = write("two.toml", 'extends = "tiny-treeflash"\n[selector]\nbudgt = 3\n[builder]\nbranching = 0\n')
    train = write("train.toml", 'extends = "tiny-train"\n[train]\nstesp = 3\n')
    status, out, err = run("check", two, "tiny-plain", "nowhere", train)
    assert (status, err) == (2, "")
    assert out.splitlines() == [
        f"{two}: wrong",
        f"{two}: 2 faults",
        "  - builder.branching: expected >= 1, found 0",
        "  - selector.budgt: unknown key; did you mean 'budget'? (known: beam, budget, depth)",
        "tiny-plain: right",
        "nowhere: wrong",
        out.splitlines()[6],
        f"{train}: wrong",
        f"{train}: train.stesp: unknown key; did you mean 'steps'? (known: average, dtype, evaluate_every, "
        "keep, save_every, seed, shard, steps, tensorboard)",
    ]
    assert out.splitlines()[6].startswith("no recipe is called 'nowhere'")


def test_check_touches_no_model(write, monkeypatch):
    monkeypatch.setattr(Recipe, "build", None)
    monkeypatch.setattr(Decoder, "generate", None)
    path = write("mine.toml", 'extends = "tiny-treeflash"\n[target]\nmodel = "no/where"\n')
    assert invoke("check", path).output == f"{path}: right\n"
