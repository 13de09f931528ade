"""What is measured along texts: replays are real runs, distances are distances, the marginal is one."""

import json

import attrs
import pytest
import torch

from treeflash.engine import Decoder, Emission
from treeflash.engine.replay import Replay
from treeflash.errors import InputError, UnsupportedTargetError
from treeflash.evaluation import evaluate as evaluating
from treeflash.evaluation.arms import ArmText, open_arms
from treeflash.evaluation.depths import COVERS, DepthMeasure, distributions
from treeflash.evaluation.eval_report import page, sections
from treeflash.evaluation.evaluate import MARGINAL, EvalSettings, _anchors, curves, evaluate
from treeflash.evaluation.marginal import true_marginal
from treeflash.evaluation.simulation import Calibration, Simulation
from treeflash.evaluation.texts import Text, conditionals, read_texts
from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.recipe import load
from treeflash.statistics import StepRecord
from treeflash.testing.lenient import Lenient
from treeflash.training.answers import AnswerStore
from treeflash.training.regeneration import RegenerationSettings, regenerate
from treeflash.tree import TokenTree
from treeflash.types import Limits

ARMS = ["tiny-ddtree", "tiny-treeflash", "tiny-dflash"]
ON_CPU = {"target": {"device": "cpu"}}
PROMPTS = [b"Ana has 7 apples.", b"Ben has 3 plums. How", b"Cleo sees 9 pears."]


@pytest.fixture(scope="module")
def opened():
    return open_arms([ArmText(name, name, {}) for name in ARMS], Registry.load(), ON_CPU)


@pytest.fixture(scope="module")
def target(opened):
    return opened[0]


def text_of(target, prompt, answer, layers=(0, 1, 2, 3)):
    ids = torch.tensor([*prompt, *answer])
    where = torch.arange(len(ids))
    outputs = target.read(ids, where, where[:, None] >= where, layers).split(target.hidden_size, dim=-1)
    return Text(ids, len(prompt), dict(zip(layers, outputs, strict=True)), {})


def test_a_lossy_arm_is_refused(opened, data):
    target, arms = opened
    lossy = attrs.evolve(arms[1], decoder=attrs.evolve(arms[1].decoder, verifier=Lenient()))
    with pytest.raises(InputError, match="arm tiny-ddtree: verifier Lenient is lossy on purpose"):
        evaluate(target, [arms[0], lossy], data, EvalSettings())


def softer(model, arguments, output):
    """Stands for a family that does something to its logits."""
    output.logits = output.logits / 2
    return output


def test_a_target_is_refused_whose_logits_are_not_those_of_its_head(opened, data):
    target, arms = opened
    handle = target.model.register_forward_hook(softer)
    try:
        with pytest.raises(
            UnsupportedTargetError, match="Qwen3ForCausalLM cannot be learned from or compared"
        ):
            evaluate(target, arms, data, EvalSettings(real=1))
        # Steps alone need no distributions.
        assert evaluate(target, arms[:1], data, EvalSettings())["texts"] > 0
    finally:
        handle.remove()


@pytest.fixture
def text(target):
    prompt = [2, *PROMPTS[0]]
    answer = Decoder(target).generate(prompt, max_new_tokens=50, stop_ids=()).token_ids
    return text_of(target, prompt, answer)


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    """A data directory with sampled answers, some held out."""
    folder = tmp_path_factory.mktemp("data")
    prompts = [Prompt((prompt.decode(),)) for prompt in PROMPTS]
    settings = RegenerationSettings(30, 0.7, 3, 0.2, 4)
    regenerate(target, "tiny", prompts, folder, settings)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "recipe", ["tiny-treeflash", "tiny-ddtree", "tiny-dflash", "tiny-draft-model", "tiny-plain"]
)
@pytest.mark.parametrize("limit", [1, 2, 9, 40])
def test_a_replay_takes_the_steps_of_the_real_run(recipe, temperature, limit):
    decoder = load(recipe, target={"device": "cpu", "dtype": "float64"})
    target, prompt = decoder.target, [2, *PROMPTS[1]]
    settings = {"max_new_tokens": limit, "stop_ids": ()}
    real = decoder.generate(prompt, temperature=temperature, seed=5, **settings)
    text = text_of(target, prompt, real.token_ids)
    replay = Replay(target, text.token_ids, text.states)
    again = attrs.evolve(decoder, target=replay).generate(prompt, **settings)
    assert list(again.token_ids) == list(real.token_ids)
    timeless = [attrs.evolve(step, seconds={}) for step in real.statistics.steps]
    assert [attrs.evolve(step, seconds={}) for step in again.statistics.steps] == timeless


def test_a_simulation_counts_every_budget_and_leaves_the_decoder_as_it_was(opened, text):
    target, arms = opened
    decoder = arms[2].decoder
    simulation = Simulation(decoder, (3, 15))
    simulation.follow(target, text)
    for budget in (3, 15):
        other = attrs.evolve(decoder, selector=attrs.evolve(decoder.selector, budget=budget))
        answer = other.generate(text.token_ids[: text.first], max_new_tokens=50, stop_ids=())
        assert simulation.by_budget[budget].block_efficiency == answer.statistics.block_efficiency
    assert simulation.own.block_efficiency == simulation.by_budget[15].block_efficiency
    assert decoder.drafter._target is target


def test_distances_and_coverage_by_hand():
    measure = DepthMeasure(2)
    true = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    # Drafts over two of the three tokens: what the target gives the third is missing from them.
    measure.add(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), true, torch.tensor([1, 2]))
    measure.add(torch.tensor([[0.25, 0.75]]), true[:1], torch.tensor([1]))
    found = measure.summary()
    assert found["drafts"] == [2, 1]
    assert found["tvd"] == pytest.approx([(0.0 + 0.25) / 2, 0.9])
    assert found["tvd_error"] == pytest.approx([(0.125**2 / 2) ** 0.5, 0.0])
    assert found["coverage"]["1"] == [pytest.approx(0.5), 0.0]
    assert found["coverage"]["2"] == [1.0, 0.0]
    assert set(found["coverage"]) == set(map(str, COVERS))


def test_a_depth_that_nothing_was_measured_at_has_no_distance(opened, data):
    measure = DepthMeasure(3)
    measure.add(torch.tensor([[0.5, 0.5]]), torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    found = json.loads(json.dumps(measure.summary()))
    assert [found[key] for key in ("tvd", "tvd_error")] == [[0.0, None, None]] * 2
    assert found["coverage"]["1"] == [0.0, None, None]
    target, arms = opened
    settings = EvalSettings(split=None, limit=1, anchors=0, paths=2, budgets=())
    results = evaluate(target, arms[:2], data, settings)
    assert [results[MARGINAL][key] for key in ("tvd", "sampling_error")] == [[None] * 7] * 2
    assert curves(results) == {}
    results[MARGINAL] = {**found, "sampling_error": [0.1, None, None]}
    assert "<td>0.000</td><td></td><td></td>" in "".join(sections(results))


@torch.inference_mode()
def test_refined_distributions_are_given_the_true_previous_token(opened, text):
    _, arms = opened
    decoder, place = arms[2].decoder, text.first + 6
    ids = text.token_ids
    state = decoder.drafter.start(1, 200)
    taps = torch.cat([text.states[layer][:place] for layer in decoder.drafter.tap_layers], dim=-1)[None]
    decoder.drafter.extend(state, ids[None, :place], taps, torch.tensor([place]))
    draft = decoder.drafter.propose(state, ids[None, place - 1 : place + 1], Limits(1, 7))
    found = distributions(decoder, draft, ids[place - 1 : place + 8])
    assert list(found) == ["backbone", "refined"]
    for probabilities in found.values():
        torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(7))
    for depth in range(7):
        previous = ids[None, None, place + depth : place + depth + 1]
        best, log_probs = decoder.refiner.children(draft, torch.tensor([depth]), previous, 5)
        torch.testing.assert_close(found["refined"][depth, best[0, 0]], log_probs[0, 0].exp())
    assert list(distributions(arms[1].decoder, draft, ids[place - 1 : place + 8])) == ["backbone"]


@torch.inference_mode()
@pytest.mark.parametrize("recipe", ["tiny-treeflash", "tiny-treeflash-bilinear"])
def test_tokens_that_are_not_scored_anew_keep_their_proportions(recipe, opened, text):
    target, _ = opened
    decoder = load(recipe, **ON_CPU, refiner={"candidates": 5})
    place, ids = text.first + 6, text.token_ids
    state = decoder.drafter.start(1, 200)
    taps = torch.cat([text.states[layer][:place] for layer in decoder.drafter.tap_layers], dim=-1)[None]
    decoder.drafter.extend(state, ids[None, :place], taps, torch.tensor([place]))
    draft = decoder.drafter.propose(state, ids[None, place - 1 : place + 1], Limits(1, 7))
    found = distributions(decoder, draft, ids[place - 1 : place + 8])
    torch.testing.assert_close(found["refined"].sum(dim=1), torch.ones(7))
    best, _ = draft.top_k(5)
    ratios = found["refined"] / found["backbone"]
    for depth in range(7):
        anew = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, best[0, depth], True)
        others = ratios[depth, ~anew & (found["backbone"][depth] > 1e-6)]
        torch.testing.assert_close(others, others[:1].expand_as(others), atol=0, rtol=1e-3)
        assert float((ratios[depth, anew] - others[:1]).abs().max()) > 1e-3


def test_conditionals_are_the_targets_own(target, text):
    state = target.start(1, 100, ())
    output = target.prefill(state, text.token_ids[None, :9])
    expected = output.logits[0, 0].float().softmax(dim=-1)
    torch.testing.assert_close(conditionals(target, text, torch.tensor([8]))[0], expected)


def test_the_marginal_is_exact_at_depth_1_and_near_the_sum_over_all_tokens_at_depth_2(target):
    # Who the text is about is not known yet.
    prefix = torch.tensor([2])
    found, apart = true_marginal(target, prefix, 3, 600, torch.Generator().manual_seed(0))

    def behind(*tokens):
        where = torch.arange(len(prefix) + len(tokens))
        ids = torch.cat([prefix, torch.tensor(tokens, dtype=torch.int64)])
        last = target.read(ids, where, where[:, None] >= where, (target.num_layers - 1,))[-1]
        return target.finish(target.head(None, target.dtype)(last).float()).softmax(dim=-1)

    first = behind()
    torch.testing.assert_close(found[0], first)
    assert float(apart[0]) == pytest.approx(0.0, abs=1e-6)
    second = sum(first[token] * behind(token) for token in range(target.vocab_size))
    distance = float(0.5 * (found[1] - second).abs().sum())
    assert distance < 0.05
    # What it is said to be off by is about what it is off by.
    assert distance < 3 * float(apart[1])
    torch.testing.assert_close(found.sum(dim=1), torch.ones(3))


def test_paths_are_drawn_by_their_generator(target):
    prefix = torch.tensor([2])

    def draw(seed):
        return true_marginal(target, prefix, 3, 4, torch.Generator().manual_seed(seed))[0]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_the_marginal_averages_all_its_paths(target):
    found, apart = true_marginal(target, torch.tensor([2]), 2, 4, torch.Generator().manual_seed(1))
    drawn = torch.multinomial(found[0].expand(4, -1), 1, generator=torch.Generator().manual_seed(1))

    def behind(token):
        where = torch.arange(2)
        last = target.read(torch.tensor([2, token]), where, where[:, None] >= where, (target.num_layers - 1,))
        return target.finish(target.head(None, target.dtype)(last[-1]).float()).softmax(dim=-1)

    each = torch.stack([behind(int(token)) for token in drawn])
    torch.testing.assert_close(found[1], each.mean(dim=0))
    halves = each[:2].mean(dim=0) - each[2:].mean(dim=0)
    torch.testing.assert_close(apart[1], 0.5 * halves.abs().sum())


def test_the_sampling_error_is_half_of_what_two_halves_are_apart(opened, data):
    target, arms = opened
    settings = EvalSettings(split=None, limit=1, anchors=1, paths=4, budgets=(), seed=6)
    found = evaluate(target, arms[:2], data, settings)[MARGINAL]
    (text,) = read_texts(data, target, (), split=None, limit=1)
    generator = torch.Generator().manual_seed(6)
    _, apart = true_marginal(target, text.token_ids[: text.first + 1], 7, 4, generator)
    assert found["sampling_error"] == pytest.approx((apart / 2).tolist())


def test_paths_make_two_halves():
    with pytest.raises(InputError, match="expected an even number, found 1"):
        EvalSettings(paths=1)


def test_a_bin_of_the_calibration_is_a_tenth():
    tree = TokenTree(
        token_ids=torch.tensor([[5, 6, 7, 8]]),
        parents=torch.tensor([[-1, 0, 0, 0]]),
        depths=torch.tensor([[0, 1, 1, 1]]),
        log_weights=torch.tensor([[1.0, 0.22, 0.18, 0.12]]).log(),
        num_nodes=torch.tensor([4]),
        max_depth=1,
    )
    calibration = Calibration()
    calibration.see(Emission([7, 9], tree, [0, 2], StepRecord(3, 1, 1, 2), None, 0.1))
    found = calibration.summary()["bins"]
    bins = [(part["nodes"], round(part["predicted"], 4), part["accepted"]) for part in found]
    assert bins == [(2, 0.15, 0.5), (1, 0.22, 0.0)]


def test_calibration_by_hand():
    tree = TokenTree(
        token_ids=torch.tensor([[5, 6, 7, 8]]),
        parents=torch.tensor([[-1, 0, 1, 0]]),
        depths=torch.tensor([[0, 1, 2, 1]]),
        log_weights=torch.tensor([[1.0, 0.65, 0.35, 0.05]]).log(),
        num_nodes=torch.tensor([4]),
        max_depth=2,
    )
    record = StepRecord(3, 2, 1, 2)
    calibration = Calibration()
    calibration.see(Emission([6, 9], tree, [0, 1], record, None, 0.1))
    # The end of a text cuts a path off: it says nothing about the draft.
    calibration.see(Emission([6], tree, [0, 1, 2], record, "max_new_tokens", 0.1))
    calibration.see(Emission([6], None, [], None, None, 0.1))
    found = calibration.summary()
    assert found["expected_accepted"] == pytest.approx(1.05)
    assert found["accepted"] == 1.0
    bins = [(part["nodes"], round(part["predicted"], 4), part["accepted"]) for part in found["bins"]]
    assert bins == [(1, 0.05, 0.0), (1, 0.35, 0.0), (1, 0.65, 1.0)]


def test_anchors_lie_in_the_answer(text):
    places = _anchors(text, 5)
    assert places[0] == text.first
    assert places[-1] == len(text.token_ids) - 2
    assert len(places) == 5
    short = Text(text.token_ids[: text.first + 1], text.first, {}, {})
    assert _anchors(short, 5) == []
    assert _anchors(text, 0) == []


def test_trees_that_go_by_time_are_the_heaviest_ones_here(opened, data, monkeypatch, tmp_path):
    """A simulation has no clock to go by."""
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    cost_aware = {"selector": {"use": "cost-aware", "most": 9}}
    texts = [ArmText("costs", "tiny-treeflash", cost_aware)]
    texts.append(ArmText("nine", "tiny-treeflash", {"selector": {"budget": 9}}))
    target, arms = open_arms(texts, Registry.load(), ON_CPU)
    results = evaluate(
        target, arms, data, EvalSettings(split=None, limit=1, anchors=0, paths=0, budgets=(4,), real=1)
    )
    costs, nine = results["arms"]["costs"], results["arms"]["nine"]
    assert costs["budget"] == 9
    for key in ("block_efficiency", "by_budget", "calibration", "real"):
        assert costs[key] == nine[key]


def test_everything_along_a_data_directory(opened, data):
    target, arms = opened
    settings = EvalSettings(split=None, anchors=4, paths=4, budgets=(3, 9), real=3)
    results = evaluate(target, arms, data, settings)
    assert results["texts"] == 3
    assert list(results["arms"]) == ["tiny-ddtree", "tiny-treeflash", "tiny-dflash"]
    for found in results["arms"].values():
        # In float32 the real run writes the same texts, and takes the same steps.
        assert found["real"]["same_texts"] == 3
        assert found["real"]["block_efficiency"] == pytest.approx(found["real"]["simulated"])
        assert found["real"]["simulated"] == pytest.approx(found["block_efficiency"])
    tree = results["arms"]["tiny-treeflash"]
    assert list(tree["by_budget"]) == ["3", "9"]
    assert tree["by_budget"]["3"] <= tree["by_budget"]["9"]
    assert results["arms"]["tiny-dflash"]["by_budget"]
    refined, backbone = tree["depths"]["refined"], tree["depths"]["backbone"]
    assert sum(refined["tvd"]) < sum(backbone["tvd"])
    # One backbone for all: shown once.
    assert list(curves(results)) == ["tiny-ddtree: backbone", "tiny-treeflash: refined", MARGINAL]
    assert results[MARGINAL]["tvd"][0] == pytest.approx(0.0, abs=1e-5)
    text = page(json.loads(json.dumps(results)))
    for expected in ("true marginal", "tiny-treeflash: refined", "<svg", "3 texts (all)", "3 of 3"):
        assert expected in text
    # A table of budgets, and all coverages that were measured.
    row = "".join(f"<td>{tree['by_budget'][size]:.2f}</td>" for size in ("3", "9"))
    assert f"<td>tiny-treeflash</td>{row}" in text
    for most in COVERS:
        assert f"tiny-treeflash: refined, top {most}<" in text


def test_as_many_texts_are_decoded_as_are_asked_for(opened, data):
    target, arms = opened
    settings = EvalSettings(split=None, anchors=0, paths=0, budgets=(), real=1)
    found = evaluate(target, arms[:2], data, settings)
    assert found["arms"]["tiny-ddtree"]["real"]["texts"] == 1
    assert found["arms"]["tiny-ddtree"]["real"]["same_texts"] == 1


def test_an_arm_that_drafts_nothing_has_no_distributions(opened, data):
    target, arms = opened
    nothing = attrs.evolve(arms[1], decoder=Decoder(target))
    found = evaluate(target, [nothing], data, EvalSettings(split=None, limit=1))
    assert MARGINAL not in found
    assert found["arms"]["tiny-ddtree"]["block_efficiency"] == 1.0


def test_held_out_answers_alone(opened, data):
    target, _ = opened
    everything = list(read_texts(data, target, (0,), split=None, limit=None))
    held = list(read_texts(data, target, (0,), split="heldout", limit=None))
    assert 0 < len(held) < len(everything) == 3
    assert len(list(read_texts(data, target, (0,), split=None, limit=2))) == 2


def test_answers_of_another_target_are_refused(opened, data, tmp_path):
    target, _ = opened
    manifest = json.loads((data / "dataset.json").read_text())
    AnswerStore(tmp_path / "other").open({**manifest, "target": "0123456789abcdef"})
    with pytest.raises(InputError, match=r"expected answers of this target, \w{16}, found those of 0123"):
        next(read_texts(tmp_path / "other", target, (), split=None, limit=None))
    AnswerStore(tmp_path / "empty").open(manifest)
    with pytest.raises(InputError, match="expected answers in its part 'heldout' to measure along"):
        next(read_texts(tmp_path / "empty", target, (), split="heldout", limit=None))
    with pytest.raises(InputError, match="expected a folder made by treeflash regenerate"):
        next(read_texts(tmp_path / "nowhere", target, (), split=None, limit=None))


def test_the_command(command, data, tmp_path):
    words = ["eval", "tiny-ddtree", "plain2=tiny-plain", "--data", data, "--split", "all", "--limit", 2]
    words += ["--out", tmp_path / "out", "--budgets", "3,9", "--paths", 2, "--anchors", 2]
    status, out, err = command(*words, "-o", "target.device=cpu")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    results = json.loads((tmp_path / "out" / "eval.json").read_text())
    found = results["arms"]["tiny-ddtree"]
    sizes = [found["block_efficiency"], found["by_budget"]["3"], found["by_budget"]["9"]]
    assert rows["tiny-ddtree"] == [f"{size:.2f}" for size in sizes]
    assert rows["plain2"][0] == "1.00"
    assert out.splitlines()[-1] == f"report: {tmp_path / 'out' / 'eval.html'}"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--budgets", "3,x"], "expected numbers of nodes like 15,63, each from 1 to 4096, found '3,x'"),
        (["--budgets", "0"], "each from 1 to 4096, found '0'"),
        (["--budgets", "4,"], "each from 1 to 4096, found '4,'"),
        (["--budgets", "5000"], "each from 1 to 4096, found '5000'"),
        (["--paths", "3"], "--paths: expected an even number, found 3"),
        (["--split", "held"], "expected heldout, train or all, found"),
    ],
)
def test_mistakes(words, fault, command, data, tmp_path):
    status, _, err = command("eval", "tiny-ddtree", "--data", data, "--out", tmp_path / "out", *words)
    assert (status, fault in err) == (2, True)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_found_before_measuring(command, data, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluating, "evaluate", lambda *words: pytest.fail("has measured"))
    (tmp_path / "out").write_text("")
    status, _, err = command("eval", "tiny-plain", "--data", data, "--out", tmp_path / "out")
    assert (status, "out: cannot be made (File exists)" in err) == (2, True)
