"""`treeflash generate`: what it prints."""

import json
import re
import shutil
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

import treeflash
from treeflash.cli import commands
from treeflash.cli.generate import _advice
from treeflash.costs import PassCosts
from treeflash.engine import Decoder, Generation
from treeflash.errors import InputError
from treeflash.statistics import Statistics, StepRecord
from treeflash.target.text import TextStream

RECIPES = ["tiny-plain", "tiny-dflash", "tiny-ddtree", "tiny-treeflash"]
PROMPT = "Ana has 7 apples."
# The tiny target ends its line, and with it the text, behind the answer.
NEARLY_DONE = (
    "Hal has 5 coins. Hal loses 2 coins, so now Hal has 3 coins. "
    "Hal buys 4 coins, so now Hal has 7 coins. The answer is"
)
NEWLINE = 10
KEYS = {
    "text",
    "token_ids",
    "prompt_tokens",
    "new_tokens",
    "steps",
    "block_efficiency",
    "tokens_per_second",
    "accepted_per_depth",
    "stop_reason",
}
SUMMARY = re.compile(
    r"\[(\d+) tokens in (\d+) steps, block efficiency (\d+\.\d\d), (\d+\.\d) tokens/s, ended by (\w+)\]"
)


def generate(*arguments):
    """What a terminal shows of a run that succeeds: the answer, and on the error stream the figures."""
    result = CliRunner().invoke(commands, ["generate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def report(*arguments):
    """The one JSON object of a run."""
    out = generate("--json", *arguments)
    assert out.endswith("}\n")
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture(scope="module")
def plain():
    return treeflash.load("tiny-plain")


def test_text_is_followed_by_one_line_of_statistics(plain):
    out = generate("tiny-treeflash", PROMPT)
    text, blank, summary, end = out.rsplit("\n", 3)
    assert (blank, end) == ("", "")
    tokens, steps, efficiency, _, reason = SUMMARY.fullmatch(summary).groups()
    expected = plain.generate(plain.target.text.encode_chat(PROMPT), max_new_tokens=256)
    assert text == plain.target.text.decode(expected.token_ids[:-1])
    assert int(tokens) == expected.new_tokens
    assert reason == expected.stop_reason == "stop_token"
    # The prefill gives the first token; the steps give the others.
    assert float(efficiency) == pytest.approx((int(tokens) - 1) / int(steps), abs=0.006)


def test_standard_output_has_the_answer_alone(plain):
    result = CliRunner().invoke(commands, ["generate", "tiny-treeflash", NEARLY_DONE], catch_exceptions=False)
    assert result.stdout == " 7.\n"
    assert SUMMARY.fullmatch(result.stderr.strip())


def test_text_comes_piece_by_piece(monkeypatch):
    pieces = []
    monkeypatch.setattr(click, "echo", lambda message=None, **options: pieces.append(message))
    generate("tiny-treeflash", PROMPT)
    _, steps, *_ = SUMMARY.search(pieces[-1]).groups()
    # A piece for the prefill, and one for each step; then the line ends.
    *shown, end, _ = pieces
    assert len([piece for piece in shown if piece]) == int(steps) + 1
    assert "".join(shown).endswith("The answer is 17.")
    assert end is None


def test_json_is_one_object_with_these_keys():
    found = report("tiny-treeflash", PROMPT, "--max-new-tokens", "30")
    assert set(found) == KEYS
    assert found["new_tokens"] == len(found["token_ids"]) == 30
    assert found["stop_reason"] == "max_new_tokens"
    assert found["prompt_tokens"] == len(PROMPT) + 1
    assert found["block_efficiency"] == pytest.approx(29 / found["steps"])
    assert found["tokens_per_second"] > 0
    accepted = found["accepted_per_depth"]
    assert accepted == sorted(accepted, reverse=True)
    assert all(isinstance(count, int) and 0 <= count <= found["steps"] for count in accepted)


def test_the_stop_token_counts_and_is_not_shown():
    found = report("tiny-treeflash", NEARLY_DONE)
    assert found["text"] == " 7."
    assert found["token_ids"][-1] == NEWLINE
    assert found["new_tokens"] == len(found["token_ids"]) == len(" 7.\n")
    assert found["stop_reason"] == "stop_token"


def test_a_stop_token_that_is_no_special_token_is_not_shown_either(tmp_path, models):
    model = shutil.copytree(models / "tiny-target", tmp_path / "model")
    settings = model / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "eos_token_id": [NEWLINE, ord(".")]}))
    arguments = ["tiny-treeflash", NEARLY_DONE, "-o", f"target.model={model}"]
    found = report(*arguments)
    assert found["text"] == " 7"
    assert found["token_ids"] == [ord(" "), ord("7"), ord(".")]
    assert generate(*arguments).startswith(" 7\n\n[3 tokens")


def test_text_held_back_comes_at_the_end(monkeypatch):
    # Half a character is never shown; what is left of one at the end is.
    monkeypatch.setattr(TextStream, "close", lambda stream: "<rest>")
    assert report("tiny-treeflash", NEARLY_DONE)["text"] == " 7.<rest>"
    assert generate("tiny-treeflash", NEARLY_DONE).startswith(" 7.<rest>\n\n[")


def test_json_and_text_say_the_same():
    out = generate("tiny-treeflash", NEARLY_DONE)
    found = report("tiny-treeflash", NEARLY_DONE)
    assert out.startswith(f"{found['text']}\n\n[{found['new_tokens']} tokens in {found['steps']} steps")


@pytest.mark.parametrize("settings", [[], ["--temperature", "0.9", "--seed", "7"]])
def test_all_recipes_write_the_same(settings):
    reports = [report(name, PROMPT, *settings) for name in RECIPES]
    assert len({(*found["token_ids"], found["text"], found["stop_reason"]) for found in reports}) == 1
    assert reports[0]["block_efficiency"] == 1.0
    assert reports[0]["accepted_per_depth"] == []
    assert all(found["block_efficiency"] > 1.2 for found in reports[1:])


def test_the_seed_decides_a_sampled_text():
    def sample(seed):
        found = report(
            "tiny-ddtree", PROMPT, "--temperature", "1.5", "--seed", seed, "--max-new-tokens", "30"
        )
        return found["token_ids"]

    assert sample("1") == sample("1")
    assert sample("1") != sample("2")


def test_the_seed_means_nothing_to_greedy_decoding():
    assert (
        report("tiny-ddtree", PROMPT, "--seed", "5")["token_ids"]
        == report("tiny-ddtree", PROMPT)["token_ids"]
    )


def test_overrides_reach_the_decoder(monkeypatch):
    seen = []
    original = Decoder.generate

    def spy(decoder, *arguments, **settings):
        seen.append(decoder)
        return original(decoder, *arguments, **settings)

    monkeypatch.setattr(Decoder, "generate", spy)
    wide = report("tiny-treeflash", PROMPT)
    narrow = report(
        "tiny-treeflash", PROMPT, "-o", "selector.budget=3", "-o", "builder.branching=2", "--dtype", "float64"
    )
    first, second = seen
    assert (first.selector.budget, second.selector.budget) == (15, 3)
    assert (first.builder.branching, second.builder.branching) == (16, 2)
    assert str(second.target.dtype) == "torch.float64"
    assert narrow["token_ids"] == wide["token_ids"]
    assert narrow["steps"] > wide["steps"]


def test_another_component_by_override():
    found = report("tiny-treeflash", PROMPT, "-o", "selector.use=chain", "-o", "selector.budget=2")
    assert len(found["accepted_per_depth"]) == 2
    assert found["text"] == report("tiny-plain", PROMPT)["text"]


def test_an_override_wins_over_its_shorthand():
    report("tiny-plain", PROMPT, "--dtype", "float16", "-o", "target.dtype=float64", "--max-new-tokens", "2")


def test_raw_leaves_the_template_out(plain):
    raw = report("tiny-treeflash", PROMPT, "--raw")
    codec = plain.target.text
    assert raw["prompt_tokens"] == len(codec.encode_raw(PROMPT))
    expected = plain.generate(codec.encode_raw(PROMPT), max_new_tokens=256)
    assert raw["token_ids"] == list(expected.token_ids)
    # What the template writes can be written by hand.
    templated = report("tiny-treeflash", f"<s>{PROMPT}", "--raw")
    assert templated["token_ids"] == report("tiny-treeflash", PROMPT)["token_ids"]


@pytest.mark.parametrize("words", [["-"], [], ["-", "--raw"]])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_prompt_from_standard_input_is_the_same_prompt(words, end):
    settings = ["--json", "--max-new-tokens", "3"]
    words = ["generate", "tiny-plain", *settings, *words]
    result = CliRunner().invoke(commands, words, input=f"{PROMPT}{end}", catch_exceptions=False)
    expected = report("tiny-plain", PROMPT, *settings, *words[-1:] * ("--raw" in words))
    found = json.loads(result.stdout)
    assert (found["token_ids"], found["prompt_tokens"]) == (expected["token_ids"], expected["prompt_tokens"])


@pytest.mark.parametrize(
    ("words", "given", "fault"),
    [
        (["-"], b"", "standard input had none"),
        ([], b"\n", "standard input had none"),
        (["-"], b"\xff", "standard input: not UTF-8 (invalid start byte)"),
        ([""], b"text", "the prompt is empty"),
    ],
)
def test_standard_input_without_a_prompt_is_a_mistake(words, given, fault):
    result = CliRunner().invoke(commands, ["generate", "tiny-plain", *words], input=given)
    assert isinstance(result.exception, InputError)
    assert fault in str(result.exception)


def test_a_terminal_is_not_read_for_a_prompt(monkeypatch, command):
    monkeypatch.setattr("sys.stdin", None)
    status, out, err = command("generate", "tiny-plain")
    assert (status, out) == (2, "")
    assert "Missing argument 'PROMPT'" in err


def test_a_recipe_beside_is_found_without_its_ending(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('extends = "tiny-dflash"\n')
    (tmp_path / "tiny-plain.toml").write_text("what an installed recipe is called, that is")
    (tmp_path / "other.toml").write_text('extends = "mine"\n')
    settings = [PROMPT, "--max-new-tokens", "3"]
    assert report("mine", *settings)["token_ids"] == report("tiny-plain", *settings)["token_ids"]
    # What a file extends does not depend on where it is used.
    result = CliRunner().invoke(commands, ["generate", "other", PROMPT])
    assert "extends: no recipe is called 'mine'" in str(result.exception)


def test_a_single_token_needs_no_step():
    found = report("tiny-treeflash", PROMPT, "--max-new-tokens", "1")
    assert (found["new_tokens"], found["steps"], found["accepted_per_depth"]) == (1, 0, [])
    assert found["block_efficiency"] == found["tokens_per_second"] == 0.0


def test_a_recipe_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "tiny-dflash"\n')
    found = report(str(path), PROMPT, "--max-new-tokens", "20")
    assert found["token_ids"] == report("tiny-dflash", PROMPT, "--max-new-tokens", "20")["token_ids"]


def test_help_names_every_option():
    out = CliRunner().invoke(commands, ["generate", "-h"]).stdout
    options = ["--max-new-tokens", "--temperature", "--seed", "--dtype", "-o", "--raw", "--json"]
    for option in ["RECIPE", "PROMPT", *options]:
        assert option in out


class TestAdvice:
    """What is said after an answer that drafts made slower."""

    def advice(self, totals, costs=None):
        steps = [
            StepRecord(3 * tried, 2, emitted - 1, emitted, {}, total, tried=tried)
            for tried, emitted, total in totals
        ]
        seconds = sum(step.total for step in steps)
        result = Generation([0] * 9, 5, "max_new_tokens", Statistics(steps, 0.1, seconds))
        decoder = SimpleNamespace(selector=SimpleNamespace(costs=costs))
        return _advice(result, decoder)

    def test_drafts_that_cost_more_than_they_brought(self):
        found = self.advice([(True, 2, 4.0)] * 5 + [(False, 1, 1.0)] * 5)
        assert "50% of the steps drafted" in found
        assert "about 0.60 times the speed of plain decoding" in found

    def test_by_timed_passes_where_every_step_drafted(self):
        costs = PassCosts([1, 4], [64], [[1.0, 2.0]])
        assert "about 0.50 times" in self.advice([(True, 1, 2.0)] * 3, costs)
        assert self.advice([(True, 3, 2.0)] * 3, costs) == ""

    def test_drafts_that_paid_or_were_none(self):
        assert self.advice([(True, 4, 2.0)] * 5 + [(False, 1, 1.0)] * 5) == ""
        # One step without a draft, as the last may be, says too little.
        assert self.advice([(True, 2, 4.0)] * 5 + [(False, 1, 1.0)]) == ""
        assert self.advice([(False, 1, 1.0)] * 3) == ""
        assert self.advice([(True, 1, 2.0)] * 3) == ""  # nothing to compare with
