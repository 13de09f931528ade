"""`treeflash bench` on the tiny target."""

import html.parser
import json
import types
import weakref

import attrs
import pytest
import torch

from treeflash.engine import Decoder
from treeflash.engine.audit import MISMATCH
from treeflash.errors import InputError, RecipeError
from treeflash.evaluation import bench as benching
from treeflash.evaluation.arms import PLAIN, Arm, ArmText, open_arms
from treeflash.evaluation.bench import RUNS, Bench, BenchSettings, read_runs, said_by
from treeflash.evaluation.prompt_sets import PromptSet
from treeflash.evaluation.report import Provenance, page, write_report
from treeflash.evaluation.summary import summarise
from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.testing.careless import Careless
from treeflash.testing.lenient import Lenient

ARMS = ["tiny-ddtree", "tree=tiny-treeflash,selector.budget=7"]
ON_CPU = {"target": {"device": "cpu"}}
ROWS = [
    {"prompt": "Ana has 7 apples."},
    {"turns": ["Ben has 3 plums.", "Cleo has 9 pears."]},
    {"prompt": "Dora sees 4 birds."},
]
SET = PromptSet("small", "here", tuple(Prompt(tuple(row.get("turns", [row.get("prompt")]))) for row in ROWS))


@pytest.fixture(scope="module")
def opened():
    return open_arms(list(map(ArmText.parse, ARMS)), Registry.load(), ON_CPU)


@pytest.fixture
def bench(opened, tmp_path):
    def bench(folder="out", sets=(SET,), arms=None, **settings):
        target, all_arms = opened
        made = BenchSettings(**{"max_new_tokens": 20, **settings})
        return Bench(target, all_arms if arms is None else arms, sets, made, tmp_path / folder)

    return bench


def counts(lines):
    """Everything that was measured but times and memory."""
    kept = []
    for line in lines:
        for run in line.runs:
            untimed = {
                "prefill_seconds": 0.0,
                "decode_seconds": 0.0,
                "pass_seconds": None,
                "peak_bytes": None,
            }
            timeless = attrs.evolve(run, seconds={}, **untimed)
            kept.append((line.set_name, line.index, line.key, timeless))
    return kept


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_arm_writes_what_plain_decoding_does(bench, temperature):
    for line in bench(temperature=temperature).run():
        runs = {(run.arm, run.turn): run for run in line.runs}
        turns = max(turn for _, turn in runs) + 1
        assert len(runs) == 3 * turns
        for (_, turn), run in runs.items():
            assert run.token_ids == runs[PLAIN, turn].token_ids
            assert run.prompt_tokens == runs[PLAIN, turn].prompt_tokens
            assert run.audit == "identical"
            assert sum(run.emitted) == len(run.token_ids) - 1
        assert set(runs[PLAIN, 0].emitted) <= {1}


def test_a_fault_is_called_a_mismatch_and_not_gone_on_from(bench, opened):
    target, arms = opened
    careless = Arm("careless", arms[2].recipe, attrs.evolve(arms[2].decoder, verifier=Careless()))
    turns = attrs.evolve(SET, prompts=SET.prompts[1:2])
    (line,) = bench(sets=[turns], arms=[arms[0], careless], max_new_tokens=90).run()
    runs = {(run.arm, run.turn): run for run in line.runs}
    assert runs["careless", 0].audit == MISMATCH
    # All arms go on from plain decoding's answer.
    codec, plain = target.require_text(), runs[PLAIN, 0]
    assert runs["careless", 0].token_ids != plain.token_ids
    answer = codec.decode([token for token in plain.token_ids if token not in target.stop_ids])
    asked = codec.encode_chat("Ben has 3 plums.", answer, "Cleo has 9 pears.")
    assert [runs[arm, 1].prompt_tokens for arm in (PLAIN, "careless")] == [len(asked)] * 2


def test_a_lossy_arm_is_labelled_and_not_audited(bench, opened):
    _, arms = opened
    lossy = Arm("lenient", arms[2].recipe, attrs.evolve(arms[2].decoder, verifier=Lenient()))
    lines = bench(arms=[*arms[:2], lossy], max_new_tokens=40).run()
    audits = {run.arm: run.audit for run in lines[0].runs}
    assert audits == {PLAIN: "identical", "tiny-ddtree": "identical", "lenient": "lossy"}
    rows = summarise(lines)["small"]
    assert [row.label for row in rows] == [PLAIN, "tiny-ddtree", "lenient (lossy)"]
    assert rows[1].audit_counts == ["4", "0", "0"]
    assert rows[2].audit_counts == ["-", "-", "-"]
    assert rows[2].audit == {"lossy": 4}


def test_a_conversation_that_outgrows_the_target_ends(bench, opened, monkeypatch):
    target, arms = opened
    first = len(target.text.encode_chat(SET.prompts[1].turns[0]))
    monkeypatch.setattr(target, "max_positions", first + 30)
    (line,) = bench(sets=[attrs.evolve(SET, prompts=SET.prompts[1:2])]).run()
    assert [run.turn for run in line.runs] == [0] * len(arms)


def test_the_stop_token_is_no_part_of_what_was_said():
    codec = types.SimpleNamespace(decode=list)
    for reason, kept in (("stop_token", [4, 5]), ("max_new_tokens", [4, 5, 6])):
        assert said_by(codec, [4, 5, 6], reason) == kept


def test_answers_are_sampled_by_seed_and_prompt(bench, opened):
    target, arms = opened
    prompt = target.require_text().encode_chat(*SET.prompts[0].turns)
    same = attrs.evolve(SET, prompts=SET.prompts[:1] * 3)
    found = [line.runs[0].token_ids for line in bench(sets=[same], temperature=3.0, seed=5).run()]
    settings = {"max_new_tokens": 20, "temperature": 3.0, "seed": 5}
    expected = [arms[0].decoder.generate(prompt, sequence=index, **settings) for index in range(3)]
    assert found == [list(answer.token_ids) for answer in expected]
    assert len(set(map(tuple, found))) == 3


def test_audits_look_at_the_scores_that_chose(bench, monkeypatch):
    seen, compare = [], benching.compare

    def spy(one, other, draws):
        seen.append((draws.temperature, draws.seed, draws.sequences))
        return compare(one, other, draws)

    monkeypatch.setattr(benching, "compare", spy)
    bench(temperature=0.5, seed=4).run()
    # Three arms, of which the second prompt has two turns.
    assert seen == [(0.5, 4, (0,))] * 3 + [(0.5, 4, (1,))] * 6 + [(0.5, 4, (2,))] * 3


def test_what_an_audit_keeps_of_an_arm_is_off_the_device_before_the_next(bench, monkeypatch):
    recorded, alive = benching.recorded, weakref.WeakSet()

    class OnDevice:
        def __init__(self, row):
            self.row = row

        def cpu(self):
            return self.row

    def spy(*words, **settings):
        assert not alive
        answer = recorded(*words, **settings)
        rows = list(map(OnDevice, answer.logits))
        alive.update(rows)
        return attrs.evolve(answer, logits=rows)

    monkeypatch.setattr(benching, "recorded", spy)
    (line,) = bench(sets=[attrs.evolve(SET, prompts=SET.prompts[:1])]).run()
    assert [run.audit for run in line.runs] == ["identical"] * 3


def test_every_arm_is_warmed_up_before_the_first_answer_and_only_then(bench, monkeypatch):
    done, generate, answer = [], Decoder.generate, Bench._answer

    def warm(decoder, *words, **settings):
        if "answer" not in done:
            done.append(type(decoder.drafter).__name__)
        return generate(decoder, *words, **settings)

    def answered(self, *rest):
        done.append("answer")
        return answer(self, *rest)

    monkeypatch.setattr(Decoder, "generate", warm)
    monkeypatch.setattr(Bench, "_answer", answered)
    measured = bench()
    measured.run()
    assert done[:3] == [type(arm.decoder.drafter).__name__ for arm in measured.arms]
    assert set(done[3:]) == {"answer"}
    # With nothing left to measure, nothing is warmed up.
    done.clear()
    bench().run()
    assert done == []


@pytest.mark.parametrize("torn", [False, True])
def test_a_resumed_measurement_is_an_unbroken_one(bench, torn):
    whole = bench("whole").run()

    class Stop(Exception):
        pass

    def stop(done, total):
        if done == 10:  # the first answer to the third prompt
            raise Stop

    broken = bench("broken")
    broken.on_answer = stop
    with pytest.raises(Stop):
        broken.run()
    path = broken.folder / RUNS
    assert len(path.read_text().splitlines()) == 2
    if torn:
        path.write_text(path.read_text()[:-40])
    kept = path.read_text().splitlines()[0]
    again = bench("broken").run()
    assert counts(again) == counts(whole)
    # What was measured is not measured again.
    assert path.read_text().splitlines()[0] == kept
    assert counts(sorted(read_runs(broken.folder), key=lambda line: line.index)) == counts(whole)


def test_another_machine_does_not_go_on(bench, monkeypatch):
    """Speeds of two machines, or of as many threads as something else left, are none of one measurement."""
    whole = bench().run()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    # What is whole may be looked at anywhere.
    assert counts(bench().run()) == counts(whole)
    path = bench().folder / RUNS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match=r"measured_on\.threads: expected \d+ as before, found 77"):
        bench().run()


def test_a_prompt_without_room_is_refused_before_all_others(bench):
    long = PromptSet("long", "here", (SET.prompts[0], Prompt((f"Ben {'and Ben ' * 400}?",))))
    measured = bench(sets=[SET, long])
    with pytest.raises(
        InputError, match=r"long \(here\): .*'Ben and.*' has \d+ tokens, expected fewer than 1024"
    ):
        measured.run()
    assert not measured.folder.exists()


def test_looking_at_a_measurement_leaves_it_as_it_is(bench):
    """Another process may be in the middle of a line."""
    measured = bench()
    measured.run()
    path = measured.folder / RUNS
    text = path.read_text()[:-40]
    path.write_text(text)
    assert len(list(read_runs(measured.folder))) == len(text.splitlines()) - 1
    assert path.read_text() == text


def test_other_settings_are_refused(bench):
    bench().run()
    with pytest.raises(InputError, match=r"settings\.max_new_tokens: expected 20 as before, found 9"):
        bench(max_new_tokens=9).run()
    with pytest.raises(InputError, match=r"arms\.tree\.selector\.budget: expected 7 as before, found None"):
        bench(arms=bench().arms[:2]).run()
    retrained = [attrs.evolve(arm, weights={key: "f" * 16 for key in arm.weights}) for arm in bench().arms]
    before = bench().arms[2].weights["drafter.checkpoint"]
    with pytest.raises(
        InputError,
        match=rf"weights\.tree\.drafter\.checkpoint: expected '{before}' as before, found 'f{{16}}'",
    ):
        bench(arms=retrained).run()
    fewer = attrs.evolve(SET, prompts=SET.prompts[:2])
    with pytest.raises(InputError, match=r"sets\.small\.prompts: expected 3 as before, found 2"):
        bench(sets=[fewer]).run()


def test_a_broken_file_is_named(bench):
    measured = bench()
    measured.run()
    line = (measured.folder / RUNS).read_text().splitlines(keepends=True)[0]
    (measured.folder / RUNS).write_text('{"set_name": "small"}\n')
    with pytest.raises(InputError, match=r"runs\.jsonl: line 1 is not a measurement"):
        bench().run()
    (measured.folder / RUNS).write_bytes(b"{}\n\xff\n")
    with pytest.raises(InputError, match=r"runs\.jsonl: line 2 is not UTF-8 \(byte 0xff at column 1\)"):
        bench().run()
    # A figure that was changed reads well.
    (measured.folder / RUNS).write_text(line.replace('"prefill_seconds": 0.', '"prefill_seconds": 1.', 1))
    with pytest.raises(InputError, match=r"line 1 is not a measurement \(its sum is another\)"):
        bench().run()


def test_who_goes_first_rotates(bench, monkeypatch):
    order = []
    measured = bench()
    answer = Bench._answer
    monkeypatch.setattr(
        Bench, "_answer", lambda self, arm, *rest: order.append(arm.name) or answer(self, arm, *rest)
    )
    measured.run()
    names = [arm.name for arm in measured.arms]
    assert order[:3] == names
    assert order[3:6] == order[6:9] == [*names[1:], names[0]]
    assert order[9:] == [*names[2:], *names[:2]]


class Page(html.parser.HTMLParser):
    """Finds what a browser would load or leave open."""

    def __init__(self):
        super().__init__()
        self.open, self.loaded, self.words = [], [], []

    def handle_starttag(self, tag, attributes):
        self.loaded += [value for key, value in attributes if key in ("src", "href") and value[0] != "#"]
        if tag not in ("meta", "path", "use"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.loaded += [value for key, value in attributes if key in ("src", "href") and value[0] != "#"]

    def handle_endtag(self, tag):
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data):
        self.words.append(data)


def test_the_report_is_one_page_that_loads_nothing(bench, tmp_path):
    measured = bench(sets=[SET, attrs.evolve(SET, name="<other>")])
    summaries = summarise(measured.run())
    manifest = json.loads((measured.folder / "bench.json").read_text())
    told = {"target": "toy", "prompts": {"small": "a.jsonl"}, "command": "treeflash bench x"}
    provenance = Provenance(**told, date="2026-12-01", version="1.2")
    path = write_report(measured.folder, summaries, manifest, provenance)
    text = path.read_text()
    found = Page()
    found.feed(text)
    assert found.loaded == []
    assert found.open == []
    words = "".join(found.words)
    for expected in ("small", "<other>", "tree", "Block efficiency", "budget 7", "float32 on", ", torch"):
        assert expected in words
    assert "toy; small from a.jsonl. Written on 2026-12-01 by treeflash 1.2, by: treeflash bench x" in words
    assert text.count("<svg") == 7
    assert page(summaries, manifest, provenance) == text
    results = json.loads((measured.folder / "results.json").read_text())
    assert results["provenance"] == {**told, "date": "2026-12-01", "version": "1.2"}
    results = results["results"]
    assert results["small"][2]["block_efficiency"] == summaries["small"][2].block_efficiency


@pytest.mark.parametrize(
    ("text", "name", "recipe", "overrides"),
    [
        ("tiny-plain", "tiny-plain", "tiny-plain", {}),
        ("a=tiny-plain", "a", "tiny-plain", {}),
        ("a=./mine.toml", "a", "./mine.toml", {}),
        ("x/y=z.toml", "x/y=z.toml", "x/y=z.toml", {}),
        (
            "a=r,selector.budget=7,drafter.target_layer_ids=[1,2]",
            "a",
            "r",
            {"selector": {"budget": 7}, "drafter": {"target_layer_ids": [1, 2]}},
        ),
        ("r,selector.budget=7", "r,selector.budget=7", "r", {"selector": {"budget": 7}}),
    ],
)
def test_arms(text, name, recipe, overrides):
    assert ArmText.parse(text) == ArmText(name, recipe, overrides)


@pytest.mark.parametrize(
    ("arms", "kind", "fault"),
    [
        (["a=tiny-plain", "a=tiny-ddtree"], InputError, "names of their own, found a twice"),
        (["plain=tiny-plain"], InputError, "the name is that of plain decoding"),
        (["tiny-plain,budget"], LookupError, "no recipe is called 'tiny-plain,budget'"),
        (["tiny-ddtree,selector.bugdet=3"], RecipeError, "did you mean 'budget'"),
        (
            ["tiny-ddtree", "b=tiny-ddtree,target.dtype=float64"],
            InputError,
            "arm b: expected the target of tiny-ddtree, .*dtype auto.* found .*dtype float64",
        ),
    ],
)
def test_arms_that_cannot_be_compared(arms, kind, fault):
    with pytest.raises(kind, match=fault):
        open_arms([ArmText.parse(arm) for arm in arms], Registry.load(), ON_CPU)


def test_progress_counts_answers(bench):
    seen = []
    measured = bench()
    measured.on_answer = lambda done, total: seen.append((done, total))
    measured.run()
    # Three prompts, one of them with two turns, by three arms.
    assert [done for done, _ in dict.fromkeys(seen)] == list(range(13))
    assert {total for _, total in seen} == {12}
