"""`treeflash generate --show-tree` and `--audit`: what is drawn, and what a planted fault comes to."""

import ast
import json
import re
import shutil

import attrs
import pytest
from click.testing import CliRunner

import treeflash
from treeflash.cli import commands
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget

PROMPT = "Ana has 7 apples."
PROMPT_TOKENS = len(PROMPT) + 1
# The tiny target ends its line, and with it the text, behind the answer.
NEARLY_DONE = (
    "Hal has 5 coins. Hal loses 2 coins, so now Hal has 3 coins. "
    "Hal buys 4 coins, so now Hal has 7 coins. The answer is"
)
NODE = re.compile(r"(?P<star>[* ]) (?P<branch>[│├└─ ]*)(?P<token>'.*'|\".*\")  (?P<weight>[01]\.\d{3})")
RECIPES = ["tiny-plain", "tiny-dflash", "tiny-ddtree", "tiny-treeflash"]
SAMPLED = ["--temperature", "0.9", "--seed", "7"]


def run(*arguments, status=0):
    result = CliRunner().invoke(commands, ["generate", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == status
    return result


def drawn(text):
    """The trees in an output: of each, its nodes as star, level, token and weight."""
    trees = []
    for line in text.splitlines():
        match = NODE.fullmatch(line)
        if match:
            level = len(match["branch"]) // 3
            if level == 0:
                trees.append([])
            trees[-1].append(
                (match["star"] == "*", level, ast.literal_eval(match["token"]), float(match["weight"]))
            )
    return trees


def starred(trees):
    return "".join(token for tree in trees for star, _, token, _ in tree if star)


@pytest.mark.parametrize("settings", [[], SAMPLED])
@pytest.mark.parametrize("name", RECIPES)
def test_the_starred_nodes_spell_the_text(name, settings):
    shown = run(name, PROMPT, "--max-new-tokens", "30", "--show-tree", *settings)
    report = json.loads(run(name, PROMPT, "--max-new-tokens", "30", "--json", *settings).stdout)
    trees = drawn(shown.stdout)
    assert len(trees) == report["steps"]
    # A step's last token is the root of the next step's tree.
    assert starred(trees) == report["text"][:-1]
    for depth, accepted in enumerate(report["accepted_per_depth"], start=1):
        assert sum((True, depth) == node[:2] for tree in trees for node in tree) == accepted


def test_each_tree_is_the_one_that_was_verified():
    trees = drawn(run("tiny-treeflash", PROMPT, "--max-new-tokens", "30", "--show-tree").stdout)
    decoder = treeflash.load("tiny-treeflash")
    emissions = []
    decoder.generate(decoder.target.text.encode_chat(PROMPT), max_new_tokens=30, on_emission=emissions.append)
    steps = [emission for emission in emissions if emission.tree is not None]
    assert len(trees) == len(steps)
    for drawing, step in zip(trees, steps, strict=True):
        count = int(step.tree.num_nodes[0])
        ids, depths = step.tree.token_ids[0, :count].tolist(), step.tree.depths[0, :count].tolist()
        weights = [f"{weight:.3f}" for weight in step.tree.log_weights[0, :count].exp().tolist()]
        nodes = zip(depths, map(decoder.target.text.decode, ([token] for token in ids)), weights, strict=True)
        # A special token may be spelled in a way of its own.
        assert sorted((level, f"{weight:.3f}") for _, level, _, weight in drawing) == sorted(
            (level, weight) for level, _, weight in nodes
        )
        assert [star for star, *_ in drawing].count(True) == len(step.path)
        assert drawing[0][1:] == (0, decoder.target.text.decode([ids[0]]), 1.0)


def test_the_text_stands_between_the_trees():
    out = run("tiny-treeflash", PROMPT, "--max-new-tokens", "30", "--show-tree").output
    lines = [line for line in out.splitlines() if line and not NODE.fullmatch(line)]
    steps = [line for line in lines if line.startswith("step ")]
    assert steps == [f"step {number}" for number in range(1, len(steps) + 1)]
    pieces = [line for line in lines if line not in steps]
    text = json.loads(run("tiny-treeflash", PROMPT, "--max-new-tokens", "30", "--json").stdout)["text"]
    assert "".join(pieces[:-1]) == text
    assert pieces[-1].startswith("[30 tokens in ")


def test_a_stop_token_is_drawn_as_what_it_is():
    trees = drawn(run("tiny-treeflash", NEARLY_DONE, "--show-tree").stdout)
    assert starred(trees) == " 7.\n"


def test_nothing_behind_the_end_of_the_text_is_starred(tmp_path, models):
    # The drafter goes on behind "Ana g"; the text does not.
    model = shutil.copytree(models / "tiny-target", tmp_path / "model")
    settings = model / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": ord("g")}))
    arguments = ["tiny-treeflash", PROMPT, "-o", f"target.model={model}"]
    assert json.loads(run(*arguments, "--json").stdout)["text"] == " Ana "
    assert starred(drawn(run(*arguments, "--show-tree").stdout)) == " Ana g"


@pytest.mark.parametrize("flags", [["--show-tree"], ["--show-tree", "--audit"]])
def test_with_json_the_trees_go_to_the_error_stream(flags):
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "20"]
    result = run(*arguments, *flags, "--json")
    assert result.stdout.count("\n") == 1
    report = json.loads(result.stdout)
    plain = json.loads(run(*arguments, "--json").stdout)
    assert {key: report[key] for key in plain if key != "tokens_per_second"} == {
        key: value for key, value in plain.items() if key != "tokens_per_second"
    }
    # Those of the run that is audited, and not of the plain one.
    assert drawn(result.stderr) == drawn(run(*arguments, "--show-tree").stdout)
    rest = [line for line in result.stderr.splitlines() if line and not NODE.fullmatch(line)]
    assert rest == [f"step {number}" for number in range(1, report["steps"] + 1)]


@pytest.fixture
def careless(monkeypatch):
    """Plants a fault: of every twenty tokens that come out of trees, one is wrong."""
    original, seen = SdpaTree.verify, []

    def verify(verifier, target, state, tree, draws):
        acceptance = original(verifier, target, state, tree, draws)
        if tree.size == 1:  # plain decoding
            return acceptance
        tokens = [list(row) for row in acceptance.tokens]
        for index, token in enumerate(tokens[0]):
            seen.append(token)
            if len(seen) % 20 == 0:
                tokens[0][index] = (token + 1) % target.vocab_size
        return attrs.evolve(acceptance, tokens=tokens)

    monkeypatch.setattr(SdpaTree, "verify", verify)


@pytest.fixture
def rounding(monkeypatch):
    """Makes another token behind a text's first new one tie with the best, or nearly: in a tree it wins."""

    def rounding(draws, rank=1):
        original = HuggingFaceTarget.verify

        def verify(target, state, tree):
            start = state.cache.length
            output = original(target, state, tree)
            if start != PROMPT_TOKENS:
                return output
            scores = draws.scores(output.logits[0, 0], start)
            best, ids = scores.topk(rank + 1)
            logits = output.logits.clone()
            logits[0, 0, ids[rank]] += best[0] - best[rank] + (-0.001 if tree.size == 1 else 0.001)
            return attrs.evolve(output, logits=logits)

        monkeypatch.setattr(HuggingFaceTarget, "verify", verify)

    return rounding


def audit_of(*arguments, status=0):
    """What an audit says in JSON; in text it says the same."""
    report = json.loads(run(*arguments, "--audit", "--json", status=status).stdout)
    assert set(report["audit"]) == {"identical", "first_difference", "kind"}
    assert report["new_tokens"] == len(report["token_ids"])
    return report["audit"]


def verdict_of(*arguments, status=0):
    out = run(*arguments, "--audit", status=status).stderr
    *_, summary, verdict, end = out.split("\n")
    assert summary.startswith("[")
    assert end == ""
    return verdict


@pytest.mark.parametrize("settings", [[], SAMPLED])
@pytest.mark.parametrize("name", RECIPES)
def test_a_right_decoder_is_identical(name, settings):
    found = audit_of(name, PROMPT, "--max-new-tokens", "24", *settings)
    assert found == {"identical": True, "first_difference": None, "kind": None}


def test_a_right_decoder_is_said_to_be_identical():
    verdict = verdict_of("tiny-treeflash", PROMPT, "--max-new-tokens", "24")
    assert verdict == "[audit: identical to plain decoding]"


# The prefill gives token 0, so the twentieth out of a tree is token 20.
@pytest.mark.parametrize("settings", [[], SAMPLED])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_planted_fault_is_a_mismatch_and_exit_status_1(form, settings, careless):
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "26", *settings]
    if form == "json":
        found = audit_of(*arguments, status=1)
        assert found == {"identical": False, "first_difference": 20, "kind": "mismatch"}
    else:
        assert verdict_of(*arguments, status=1) == "[audit: mismatch at new token 20]"


@pytest.mark.parametrize("draws", [Draws(), Draws(0.9, 7)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_near_tie_is_named_and_no_failure(form, draws, rounding):
    settings = SAMPLED if draws.temperature else []
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "12", *settings]
    rounding(draws)
    if form == "json":
        assert audit_of(*arguments) == {"identical": False, "first_difference": 1, "kind": "near-tie"}
    else:
        assert verdict_of(*arguments) == "[audit: near-tie at new token 1]"


@pytest.mark.parametrize("draws", [Draws(), Draws(0.9, 7)], ids=["greedy", "sampled"])
def test_a_third_token_that_rounding_brings_to_the_top_is_a_near_tie_too(draws, rounding):
    rounding(draws, rank=2)
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "12", *(SAMPLED if draws.temperature else [])]
    found = audit_of(*arguments)
    assert found == {"identical": False, "first_difference": 1, "kind": "near-tie"}


def test_a_second_best_that_no_rounding_explains_is_no_near_tie(monkeypatch):
    original, asked = Draws.choose_one, []

    def choose_one(draws, logits, position, row=0):
        asked.append(position)
        if position == PROMPT_TOKENS and asked.count(position) == 1:  # later plain decoding asks
            return int(logits.topk(2).indices[1])
        return original(draws, logits, position, row)

    monkeypatch.setattr(Draws, "choose_one", choose_one)
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "12", "-o", "target.device=cpu"]
    found = audit_of(*arguments, status=1)
    assert found == {"identical": False, "first_difference": 1, "kind": "mismatch"}


def test_the_text_of_an_audit_is_that_of_the_trees(careless):
    # What is shown is what was decoded, right or wrong.
    arguments = [PROMPT, "--max-new-tokens", "26", "--json"]
    found = json.loads(run("tiny-treeflash", *arguments, "--audit", status=1).stdout)["token_ids"]
    plain = json.loads(run("tiny-plain", *arguments).stdout)["token_ids"]
    assert found[:21] == [*plain[:20], plain[20] + 1]


def test_what_is_lossy_on_purpose_is_not_compared(monkeypatch):
    monkeypatch.setattr(SdpaTree, "lossless", False)
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "6"]
    assert audit_of(*arguments) == {"identical": None, "first_difference": None, "kind": "lossy"}
    verdict = verdict_of(*arguments)
    assert verdict == "[audit: not compared: verifier SdpaTree is lossy on purpose]"


def test_without_the_flag_nothing_is_audited(careless):
    arguments = ["tiny-treeflash", PROMPT, "--max-new-tokens", "26"]
    assert "audit" not in run(*arguments).output
    assert "audit" not in json.loads(run(*arguments, "--json").stdout)
