"""`treeflash.bench`, `evaluate` and `train`: decoders and recipes in the place of command lines."""

import json

import attrs
import pytest

import treeflash
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import InputError, RecipeError, TreeflashError
from treeflash.evaluation import from_python
from treeflash.evaluation.arms import PLAIN
from treeflash.evaluation.evaluate import read_results
from treeflash.prompts import Prompt
from treeflash.testing.families import tiny_model
from treeflash.training.regeneration import RegenerationSettings, regenerate

TEXTS = {"small": ["Ana has 7 apples.", "Ben has 3 plums."]}


@pytest.fixture(scope="module")
def decoder():
    return treeflash.load("tiny-treeflash", target={"device": "cpu"}, selector=OptTree(7))


@pytest.fixture(scope="module")
def data(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prompts = [Prompt((f"Ana has {count} apples.",)) for count in range(3, 11)]
    settings = RegenerationSettings(max_new_tokens=16, heldout=0.3)
    regenerate(decoder.target, "treeflash.testing:models/tiny-target", prompts, folder, settings)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    """Leaves the pictures of reports out, which take longer than a tiny target's answers."""
    monkeypatch.setattr(from_python, "write_report", lambda *arguments: None)


def test_decoders_and_recipes_are_measured_side_by_side(decoder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arms = {"mine": decoder, "chain": "tiny-dflash", "small": "tiny-treeflash,selector.budget=3"}
    seen = []
    found = treeflash.bench(
        arms, TEXTS, out, max_new_tokens=12, on_answer=lambda done, total: seen.append((done, total))
    )
    rows = found["small"]
    assert [row.arm for row in rows] == [PLAIN, "mine", "chain", "small"]
    assert all(row.audit == {"identical": 2} for row in rows)
    assert rows[1].block_efficiency > rows[0].block_efficiency == 1
    assert list(dict.fromkeys(seen)) == [(done, 8) for done in range(9)]  # of four arms to two prompts
    assert (out / "report.html").is_file()
    # Which parts were measured can be told, and figures of others are not taken for theirs.
    assert "/tiny-target; small from Python." in (out / "report.html").read_text()
    measured = json.loads((out / "bench.json").read_text())
    assert measured["arms"][PLAIN] == {}
    assert measured["arms"]["mine"]["selector"] == {
        "use": "treeflash.components.selectors.opt_tree:OptTree",
        "budget": 7,
        "depth": None,
        "beam": None,
    }
    assert set(measured["weights"]["mine"]) == {"drafter.network", "refiner.network"}
    monkeypatch.setattr(from_python, "write_report", lambda *arguments: None)
    runs = (out / "runs.jsonl").read_bytes()
    treeflash.bench(arms, TEXTS, out, max_new_tokens=12)
    assert (out / "runs.jsonl").read_bytes() == runs
    other = {**arms, "mine": attrs.evolve(decoder, selector=OptTree(5))}
    with pytest.raises(InputError, match=r"arms.mine.selector.budget: expected 7 as before, found 5"):
        treeflash.bench(other, TEXTS, out, max_new_tokens=12)


def test_other_weights_of_a_decoder_are_seen(decoder, tmp_path, undrawn):
    treeflash.bench({"mine": decoder}, {"one": ["Ana"]}, tmp_path / "out", max_new_tokens=2)
    drafter = treeflash.load("tiny-treeflash", target=decoder.target).drafter
    next(drafter.network.parameters()).data[0] += 1
    other = attrs.evolve(decoder, drafter=drafter)
    with pytest.raises(InputError, match=r"weights\.mine\.drafter\.network: expected "):
        treeflash.bench({"mine": other}, {"one": ["Ana"]}, tmp_path / "out", max_new_tokens=2)


def test_recipes_alone_and_prompt_files(tmp_path, undrawn):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS["small"]))
    found = treeflash.bench(
        ["a=tiny-plain", "tiny-dflash"], file, tmp_path / "out", limit=1, max_new_tokens=3
    )
    assert [(row.arm, row.prompts) for row in found["mine"]] == [(PLAIN, 1), ("a", 1), ("tiny-dflash", 1)]


def test_decoders_are_measured_along_texts(decoder, data):
    arms = {"mine": decoder, "chain": attrs.evolve(decoder, selector=Chain())}
    found = treeflash.evaluate(arms, data, limit=2, anchors=1, paths=0, budgets=(3,))
    assert list(found["arms"]) == ["mine", "chain"]
    assert found["texts"] == 2
    assert found["arms"]["mine"]["block_efficiency"] > 1


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"split": "test"}, "split: expected heldout, train, all, found 'test'"),
        ({"paths": 3}, "settings: expected an even number, found 3"),
        ({"pahts": 4}, "no setting is called 'pahts'; did you mean 'paths'?"),
    ],
)
def test_a_wrong_setting_of_an_evaluation(settings, fault, decoder, data):
    with pytest.raises(InputError) as error:
        treeflash.evaluate({"mine": decoder}, data, **settings)
    assert fault in str(error.value)


def test_an_evaluation_is_written_where_it_is_told_to(decoder, data, tmp_path):
    out = tmp_path / "out"
    settings = {"limit": 1, "anchors": 1, "paths": 0, "budgets": (3,)}
    found = treeflash.evaluate({"mine": decoder}, data, out, **settings)
    assert read_results(out) == json.loads(json.dumps(found))
    assert (out / "eval.html").is_file()


def test_a_drafter_is_trained_and_decodes(data, tmp_path):
    recipe = treeflash.train("tiny-train-refiner", data, tmp_path / "run", train={"steps": 1})
    assert recipe == tmp_path / "run" / "drafter" / "recipe.toml"
    found = treeflash.load(recipe, target={"device": "cpu"})
    assert found.generate([2, *b"Ana"], max_new_tokens=3).new_tokens == 3


def mistakes(decoder):
    other = Decoder(treeflash.wrap_model(tiny_model("llama")))
    return {
        "expected a decoder of the same target object": ({"a": decoder, "b": other}, TEXTS, {}),
        "no setting is called 'max_tokens'; did you mean 'max_new_tokens'": (
            {"a": decoder},
            TEXTS,
            {"max_tokens": 3},
        ),
        "found a Decoder": ([decoder], TEXTS, {}),
        "found None": ({"a": None}, TEXTS, {}),
        "no recipe is called 'tiny-tre'": ({"a": decoder, "b": "tiny-tre"}, TEXTS, {}),
        "that name is plain decoding's": ({PLAIN: decoder}, TEXTS, {}),
        "arms need names of their own": (["tiny-plain", "tiny-plain"], TEXTS, {}),
        "small (Python): expected prompts, found none": ({"a": decoder}, {"small": []}, {}),
        "expected a file or a known set": ({"a": decoder}, ["Ana has 7 apples."], {}),
        "expected sets of different names": ({"a": decoder}, ["x/a.jsonl", "y/a.jsonl"], {}),
    }


@pytest.mark.parametrize("number", range(10))
def test_mistakes(number, decoder, tmp_path):
    message, (arms, prompts, settings) = list(mistakes(decoder).items())[number]
    with pytest.raises(TreeflashError) as error:
        treeflash.bench(arms, prompts, tmp_path / "out", **settings)
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_training_recipe_is_asked_for_to_train(data, tmp_path):
    with pytest.raises(RecipeError, match="this recipe decodes, it does not train"):
        treeflash.train("tiny-plain", [data], tmp_path / "run")


@pytest.mark.parametrize(
    ("arms", "prompts", "settings", "fault"),
    [
        (["tiny-ddtree"], {"a": "hey"}, {}, "prompts a: expected a list of texts"),
        (["tiny-ddtree"], {}, {}, "prompts: expected at least one set"),
        (["tiny-ddtree"], {"a": ["hey"]}, {"limit": 0}, "limit: expected an integer of at least 1"),
        (["tiny-ddtree"], {"a": ["hey"]}, {"limit": -1}, "limit: expected an integer of at least 1"),
        ([], {"a": ["hey"]}, {}, "arms: expected at least one"),
        (["tiny-ddtree"], {"a": ["hey"]}, {"max_new_tokens": "2"}, "max_new_tokens: expected an integer"),
        (["tiny-ddtree"], {"a": ["hey"]}, {"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        (["tiny-ddtree"], {"a": ["hey"]}, {"temperature": float("nan")}, "temperature"),
    ],
)
def test_a_mistaken_bench_leaves_no_folder(arms, prompts, settings, fault, tmp_path):
    with pytest.raises(InputError, match=fault):
        treeflash.bench(arms, prompts, tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()
