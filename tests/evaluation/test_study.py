"""Studies: the plan is checked before anything runs, and what is there is gone on with."""

import json
import shutil
import sys
import tomllib

import pytest

from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.errors import InputError, RecipeError, UnknownNameError
from treeflash.evaluation.study import Study, page_name
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.names import wrong_name
from treeflash.plugins import Registry
from treeflash.training.checksums import append_sum

SMALL = """
title = "A < B"
[target]
device = "cpu"
[answers]
recipe = "tiny-plain"
prompts = ["toy.jsonl", "more.jsonl"]
max_new_tokens = 20
heldout = 0.4
[trained.backbone]
recipe = "tiny-train"
set = ["train.steps=2", "refiner.use=none", "drafter.layers=1", "data.batch_size=2"]
states = "all"
[trained.refiner]
recipe = "tiny-train-refiner"
set = ["train.steps=2", "data.batch_size=2"]
start = "backbone"
states = "all"
[arms.ngram]
recipe = "tiny-ddtree"
set = ["selector.budget=5"]
[arms.chain]
trained = "backbone"
set = ["builder.use=marginal", "selector.use=chain"]
[arms.tree]
trained = "refiner"
set = ["builder.use=top-m", "selector.budget=5", "drafter.temperature=0.9"]
[bench.greedy]
prompts = ["toy.jsonl"]
limit = 1
max_new_tokens = 8
arms = ["chain", "tree"]
[bench.sampled]
prompts = ["toy.jsonl"]
limit = 1
max_new_tokens = 8
temperature = 1.0
arms = ["tree"]
[eval.everywhere]
arms = ["ngram"]
limit = 2
anchors = 0
paths = 0
budgets = [4]
[eval.held-out]
answers = ["toy.jsonl"]
limit = 1
anchors = 2
paths = 2
budgets = [3]
"""


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8", errors="surrogateescape")
        return path

    return write


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": f"{name} has {count} apples."} for name in ("Ana", "Ben", "Cleo") for count in (3, 5)]
    for name in ("toy", "more", "a<b>"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_from_prompts_to_a_report_and_again(write, inputs, registry, tmp_path):
    plan, out, said = StudyPlan.load(write(SMALL), registry), tmp_path / "out", []
    page = Study(plan, registry, inputs, out, said.append).run()
    text = page.read_text()
    assert "<title>A &lt; B</title>" in text
    for expected in (
        "Trainings",
        "Side by side: greedy",
        "Side by side: sampled",
        "held-out, along answers to toy",
        "backbone",
    ):
        assert expected in text
    told = [line for line in said if not line.startswith("along held-out texts")]  # the end of a training
    begins = [line for line in told if line.split()[0] in ("answers", "training", "bench", "along")]
    assert [line.split()[0] for line in begins] == ["answers"] * 2 + ["training"] * 2 + ["bench"] * 2 + [
        "along"
    ] * 3
    # One folder of states for both trainings.
    assert {path.name for path in (out / "states").iterdir()} == {"all"}
    assert not (out / "trained" / "refiner" / "states").exists()
    record = json.loads((out / "trained" / "refiner" / "drafter" / "training.json").read_text())
    assert record["recipe"]["drafter"]["checkpoint"] == str(out / "trained" / "backbone" / "drafter")
    bench = json.loads((out / "bench" / "sampled" / "bench.json").read_text())
    assert list(bench["arms"]) == ["plain", "tree"]
    assert bench["settings"]["temperature"] == 1.0
    folders = {str(path.parent.relative_to(out)) for path in out.glob("eval/*/*/eval.json")}
    assert folders == {"eval/everywhere/toy", "eval/everywhere/more", "eval/held-out/toy"}
    measured = json.loads((out / "eval" / "held-out" / "toy" / "eval.json").read_text())
    assert list(measured["arms"]) == ["ngram", "chain", "tree"]
    # Again, where somebody has moved it to: everything is there, and the report is the same.
    out = out.rename(tmp_path / "moved")
    runs = (out / "bench" / "greedy" / "runs.jsonl").read_bytes()
    assert Study(plan, registry, inputs, out).run().read_text() == text
    assert (out / "bench" / "greedy" / "runs.jsonl").read_bytes() == runs
    # A drafter that was measured is not trained on.
    shutil.rmtree(out / "bench")
    longer = SMALL.replace('"train.steps=2"', '"train.steps=3"')
    with pytest.raises(InputError, match=r"backbone was begun .*: train\.steps: expected 2 as before"):
        Study(StudyPlan.load(write(longer), registry), registry, inputs, out).run()
    assert not (out / "bench").exists()


def test_figures_of_something_else_are_not_taken_for_its_own(write, inputs, registry, models, tmp_path):
    checkpoint = shutil.copytree(models / "tiny-dflash", tmp_path / "drafter")
    head, middle = SMALL[: SMALL.index("[trained.backbone]")], SMALL[SMALL.index("[arms.ngram]") :]
    arm, rest = middle[: middle.index("[arms.chain]")], SMALL[SMALL.index("[eval.held-out]") :]
    text = (head + arm + rest).replace("toy", "a<b>")
    text = text.replace('"selector.budget=5"', f'"drafter.checkpoint={checkpoint}"')

    def run(text):
        return Study(StudyPlan.load(write(text), registry), registry, inputs, tmp_path / "out").run()

    page = run(text).read_text()
    assert "answers to a&lt;b&gt;" in page
    assert "<b>" not in page
    with pytest.raises(InputError, match=r"settings\.anchors: expected 2 as before, found 1"):
        run(text.replace("anchors = 2", "anchors = 1"))
    answers = next((tmp_path / "out" / "answers" / "a<b>").glob("answers-*.jsonl"))
    kept = answers.read_text()
    answers.write_text(kept.replace('"answer_ids": [', '"answer_ids": [9, ', 1))
    append_sum(answers)
    with pytest.raises(InputError, match=r"answers: expected '\w{16}' as before, found '\w{16}'"):
        run(text)
    answers.write_text(kept)
    # The drafter is trained on, at the same place.
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text() + "\n")
    with pytest.raises(InputError, match=r"weights\.ngram\.drafter\.checkpoint: expected '\w{16}' as before"):
        run(text)


def test_a_prompt_file_that_is_missing_is_found_before_anything_runs(write, inputs, registry, tmp_path):
    text = changed(
        ('[bench.greedy]\nprompts = ["toy.jsonl"]', '[bench.greedy]\nprompts = ["gsm8k=tyo.jsonl"]')
    )
    study = Study(StudyPlan.load(write(text), registry), registry, inputs, tmp_path / "out")
    with pytest.raises(InputError, match=r"tyo\.jsonl: cannot be read"):
        study.run()
    assert not (tmp_path / "out").exists()


def test_a_measurement_alone_has_what_it_needs(write, registry):
    plan = StudyPlan.load(write(SMALL), registry)

    def kept(*names):
        found = plan.only(names)
        parts = (found.trained, found.arms, found.benches, found.evals)
        return [sorted(part) for part in parts], found.answers is not None

    # The refiner starts with the backbone's drafter.
    assert kept("bench.sampled") == ([["backbone", "refiner"], ["tree"], ["sampled"], []], True)
    assert kept("eval.everywhere") == ([[], ["ngram"], [], ["everywhere"]], True)
    assert plan.only(["eval.everywhere"]).answers.prompts == ["toy.jsonl", "more.jsonl"]
    both = ([["backbone", "refiner"], ["chain", "ngram", "tree"], ["greedy"], ["held-out"]], True)
    assert kept("eval.held-out", "bench.greedy") == both
    with pytest.raises(InputError, match=r"called 'bench\.gredy'; did you mean 'bench\.greedy'"):
        plan.only(["bench.gredy"])


def test_without_trainings_answers_are_those_that_are_looked_at(write, registry):
    text = changed(("limit = 1\nanchors", 'arms = ["ngram"]\nlimit = 1\nanchors'))
    found = StudyPlan.load(write(text), registry).only(["eval.held-out"])
    assert not found.trained
    assert found.answers.prompts == ["toy.jsonl"]


def test_a_bench_of_recipes_needs_no_answers(write, registry):
    text = changed(('arms = ["chain", "tree"]', 'arms = ["ngram"]'))
    found = StudyPlan.load(write(text), registry).only(["bench.greedy"])
    assert found.answers is None
    assert not found.trained


def test_a_key_at_fault_makes_no_table_missing(write, registry):
    text = changed(("limit = 1\nmax", "limt = 1\nmax"))
    text = text[: text.index("[bench.sampled]")]
    with pytest.raises(RecipeError) as error:
        StudyPlan.load(write(text), registry)
    assert "found neither" not in str(error.value)


@pytest.mark.parametrize("name", sorted(Registry.load().studies))
def test_shipped_studies_are_right(name, registry, write):
    path = registry.study(name)
    names = {table["recipe"] for table in tomllib.loads(path.read_text())["trained"].values()}
    if names - set(registry.recipes):
        pytest.skip("a plugin that it needs is not installed")
    StudyPlan.load(path, registry)


def changed(*changes):
    text = SMALL
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    return text


FAULTS = {
    "no TOML": ("[answers", ["not valid TOML"]),
    "misspelled table": (
        changed(("[bench.greedy]", "[banch.greedy]")),
        ["unknown table [banch]; did you mean 'bench'"],
    ),
    "a package that is not there": (
        'packages = ["treeflash", "treeflash-nonesuch"]\n[trained.x]\nrecipe = "none-such"',
        ["packages: expected treeflash-nonesuch to be installed, found none"],
    ),
    "packages that are none": ("packages = 'x'", ["packages: expected a list of names, found 'x'"]),
    "a package of a version": ("packages = ['x>1']", ["expected a list of names, found ['x>1']"]),
    "misspelled key": (
        changed(("limit = 1", "limt = 1")),
        ["bench.greedy.limt: unknown key; did you mean 'limit'"],
    ),
    "wrong type": (changed(("heldout = 0.4", "heldout = 'x'")), ["answers.heldout: expected a number"]),
    "no table": (
        changed(("[arms.ngram]", "[arms]\nx = 3\n[arms.ngram]")),
        ["arms.x: expected a table, found 3"],
    ),
    "no such recipe": (
        changed(('recipe = "tiny-train"', 'recipe = "tiny-tran"')),
        ["trained.backbone.recipe: no recipe is called 'tiny-tran'; did you mean 'tiny-train'"],
    ),
    "no such training": (
        changed(('trained = "refiner"', 'trained = "refinr"')),
        ["arms.tree.trained: no training is called 'refinr'; did you mean 'refiner'"],
    ),
    "a start that comes later": (
        changed(('start = "backbone"', 'start = "refiner"')),
        ["trained.refiner.start: no training before it is 'refiner' (known: backbone)"],
    ),
    "both": (
        changed(('trained = "backbone"', 'trained = "backbone"\nrecipe = "tiny-plain"')),
        ["arms.chain: expected recipe or trained, found both"],
    ),
    "neither": (
        changed(('trained = "backbone"', "")),
        ["arms.chain: expected recipe or trained, found neither"],
    ),
    "no such arm": (
        changed(('arms = ["chain", "tree"]', 'arms = ["chain", "tee"]')),
        ["bench.greedy.arms: no arm is called 'tee'; did you mean 'tree'"],
    ),
    "no such answers": (
        changed(('answers = ["toy.jsonl"]', 'answers = ["toy"]')),
        ["eval.held-out.answers: no file of answers.prompts is 'toy'; did you mean 'toy.jsonl'"],
    ),
    "an evaluation of nothing": (
        changed(('answers = ["toy.jsonl"]', "answers = []"), ('arms = ["ngram"]', "arms = []")),
        [
            "eval.everywhere.arms: expected one or more, found []",
            "eval.held-out.answers: expected one or more, found []",
        ],
    ),
    "an empty table": (
        "[arms.x]\nrecipe = 'tiny-plain'\n[eval]",
        ["[eval]: expected a table [eval.NAME], found nothing in it"],
    ),
    "a table alone": (
        changed(("[eval.held-out]", "[eval]")),
        ["eval.limit: expected a table, found 1"],
    ),
    "overrides": (
        changed(('"selector.budget=5"', '"budget=5"')),
        ["arms.ngram.set: overrides: expected table.key=value, found 'budget=5'"],
    ),
    "an override of nothing": (
        changed(('"selector.budget=5"]\n[arms.chain]', '"selector.budgt=5"]\n[arms.chain]')),
        [
            "arms.ngram: ",
            "tiny-ddtree.toml (",
            "overridden): selector.budgt: unknown key; did you mean 'budget'",
        ],
    ),
    "an override of what a training leaves": (
        changed(
            ('"builder.use=marginal", "selector.use=chain"', '"builder.use=margin", "selectr.use=chain"'),
            (
                '"builder.use=top-m", "selector.budget=5"',
                '"builder.use=top-m", "builder.branching=0", "selector.budgt=5"',
            ),
        ),
        [
            "arms.chain.set: unknown table [selectr]; did you mean 'selector'",
            "arms.chain.set: builder.use: no builder is called 'margin'; did you mean 'marginal'",
            "arms.tree.set: builder.branching: expected >= 1, found 0",
            "arms.tree.set: selector.budgt: unknown key; did you mean 'budget'",
        ],
    ),
    "an override of a training": (
        changed(('"train.steps=2", "data.batch_size=2"', '"train.steps=2", "data.batch_size=0"')),
        ["trained.refiner: ", "data.batch_size: expected >= 1, found 0"],
    ),
    "the name of plain decoding": (
        changed(("[arms.ngram]", "[arms.plain]")),
        ["arms.plain: expected another name, because plain decoding has it"],
    ),
    "numbers out of range": (
        changed(
            ("max_new_tokens = 20", "max_new_tokens = 0\nlimit = 0\ntemperature = -1.0"),
            ("heldout = 0.4", "heldout = 7.0"),
            ("limit = 1\nmax_new_tokens = 8", "limit = -1\nmax_new_tokens = 0\ndraw = -1"),
            ("limit = 1\nanchors", "limit = 0\nreal = -1\nanchors"),
            ("paths = 2", "paths = 3"),
            ("budgets = [3]", "budgets = [3, -4]"),
        ),
        [
            "answers.max_new_tokens: expected >= 1, found 0",
            "answers.limit: expected >= 1, found 0",
            "answers.temperature: expected >= 0, found -1.0",
            "answers.heldout: expected <= 1, found 7.0",
            "bench.greedy.limit: expected >= 1, found -1",
            "bench.greedy.max_new_tokens: expected >= 1, found 0",
            "bench.greedy.draw: expected >= 0, found -1",
            "eval.held-out.limit: expected >= 1, found 0",
            "eval.held-out.real: expected >= 0, found -1",
            "eval.held-out.paths: expected an even number, found 3",
            "eval.held-out.budgets: expected >= 1, found -4",
        ],
    ),
    "a budget that no selector takes": (
        changed(("budgets = [3]", "budgets = [3, 5000]")),
        ["eval.held-out.budgets: expected <= 4096, found 5000"],
    ),
    "files of one name": (
        changed(
            ('["toy.jsonl", "more.jsonl"]', '["toy.jsonl", "b/toy.jsonl"]'),
            ('["toy.jsonl"]', '["toy.jsonl", "toy"]'),
        ),
        [
            "answers.prompts: expected sets of different names, found toy twice",
            "bench.greedy.prompts: expected sets of different names, found toy twice",
        ],
    ),
    "names that leave the folder": (
        changed(
            ("[bench.greedy]", '[bench."../../x"]'),
            ("[trained.backbone]", '[trained."../../../x"]'),
            ("[eval.everywhere]", '[eval."a/b"]'),
            ('states = "all"', 'states = "../.."'),
            ('"more.jsonl"', '"..jsonl"'),
        ),
        [
            "trained: expected a name without '/', found '../../../x'",
            "bench: expected a name without '/', found '../../x'",
            "eval: expected a name without '/', found 'a/b'",
            "trained.NAME.states: expected a name without '/', found '../..'",
            "answers.prompts: expected a name that neither begins nor ends with a dot or a space, found '.'",
        ],
    ),
    "names too long for a file": (
        changed(("[bench.greedy]", f"[bench.{'g' * 101}]")),
        ["bench: expected a name of at most 100 bytes, found 101"],
    ),
    "names that some file systems take for one": (
        changed(("[bench.sampled]", "[bench.Greedy]")),
        ["bench: expected names that differ in more than case, found 'greedy' and 'Greedy'"],
    ),
    "bytes that are no text": (
        '# \udcff\n[arms.x]\nrecipe = "tiny-plain"',
        ["mine.toml: line 1 is not UTF-8 (byte 0xff at column 3)"],
    ),
    "nothing": ("", ["[arms]: expected something", "[bench.NAME] or [eval.NAME], found neither", "2 faults"]),
    "no answers": (
        "[arms.x]\nrecipe = 'tiny-plain'\n[eval.x]",
        ["[answers]: expected a table, because drafters learn from answers"],
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_fault(case, write, registry):
    text, parts = FAULTS[case]
    path = write(text)
    with pytest.raises(RecipeError) as error:
        StudyPlan.load(path, registry)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    for part in parts:
        assert part in message


def test_pages_of_many_measurements_have_names_that_a_file_can_have():
    assert page_name(["bench.a", "eval.b"]) == "report-bench.a-eval.b.html"
    names = [f"bench.{letter * 90}" for letter in "abcdefgh"]
    found = {page_name(names), page_name(names[:-1]), page_name(names[::-1])}
    assert len(found) == 3
    assert all(wrong_name(name) is None for name in found)
    assert page_name(names).startswith("report-8-measurements-")


def test_the_command(command, write, inputs, tmp_path, monkeypatch):
    text = "[target]\ndevice = 'cpu'\n[arms.x]\nrecipe = 'tiny-ddtree'\n"
    text += "[bench.all]\nprompts = ['toy.jsonl']\nlimit = 1"
    words = ["--prompts", inputs, "--out", tmp_path / "out"]
    both = f"{text}\nmax_new_tokens = 6\n[bench.more]\nprompts = ['gone.jsonl']"
    status, out, _ = command("study", write(both), *words, "--only", "bench.all")
    # A page of its own, so that one of everything stays.
    page = tmp_path / "out" / "report-bench.all.html"
    assert (status, out.splitlines()[-1]) == (0, f"report: {page}")
    assert page.is_file()
    assert not (tmp_path / "out" / "report.html").exists()
    shutil.rmtree(tmp_path / "out")
    status, _, err = command("study", write(both), *words, "--only", "bench.al")
    assert (status, "no measurement is called 'bench.al'; did you mean 'bench.all'" in err) == (2, True)
    status, _, err = command("study", "papr", *words)
    assert (status, "no study is called 'papr'; did you mean 'paper'?" in err) == (2, True)
    status, _, err = command("study", tmp_path / "none.toml", *words)
    assert (status, "none.toml: cannot be read" in err) == (2, True)
    # Its report is written last: what that needs is looked for first.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = command("study", write(text), *words)
    assert (status, "a study needs matplotlib" in err, "pip install matplotlib" in err) == (2, True, True)
    assert not (tmp_path / "out").exists()


def test_studies_are_no_recipes(registry):
    assert "paper" not in registry.recipes
    with pytest.raises(UnknownNameError):
        registry.recipe("tiny")


def test_a_lossy_arm_is_refused_before_anything_is_measured(write, inputs, registry, tmp_path, monkeypatch):
    monkeypatch.setattr(SdpaTree, "lossless", False)
    plan = """
title = "Lossy"
[answers]
recipe = "tiny-plain"
prompts = ["toy.jsonl"]
limit = 1
max_new_tokens = 4
[arms.tree]
recipe = "tiny-treeflash"
[bench.greedy]
prompts = ["toy.jsonl"]
[eval.held-out]
"""
    with pytest.raises(InputError, match="arm plain: verifier SdpaTree is lossy on purpose"):
        Study(StudyPlan.load(write(plan), registry), registry, inputs, tmp_path / "out").run()
    assert not (tmp_path / "out" / "bench").exists()
