"""What a block drafter learns against a loop over slots, for every refiner, with and without a shortlist."""

import json

import attrs
import pytest
import torch

from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.components.refiners.bilinear import Bilinear
from treeflash.components.refiners.linear import Linear
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.refiners.trained import Lesson
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.trainables.blocks import Blocks
from treeflash.components.trainables.comparison import measure
from treeflash.components.trainables.dflash import DFlashTrainable, DFlashTrainingOptions, Questions
from treeflash.engine import Decoder
from treeflash.engine.chains import chain_steps
from treeflash.errors import CompositionError
from treeflash.packed_text import PackedText
from treeflash.places import locate
from treeflash.trainable import Task, TrainContext
from treeflash.training.states import ComputedStates
from treeflash.training.texts import Text, pack

PROMPT = [2, *b"Gus has 12 pens. Gus finds"]
REFINERS = {"none": None, "swiglu": SwiGlu, "two-token": TwoToken, "linear": Linear, "bilinear": Bilinear}


def trainable(target, kind=None, columns=None, *, shaken=True, refiner_checkpoint=None, **options):
    """A trainable around the tiny drafter's backbone, its refiner far from zero."""
    made = DFlashTrainable.from_options(
        DFlashTrainingOptions(**{"checkpoint": "treeflash.testing:models/tiny-dflash", **options}),
        TrainContext(
            target=target,
            locate=locate,
            loss=ForwardKl(),
            columns=columns,
            frequent=lambda size: torch.arange(size),
            refiner=kind,
            refiner_options=None if kind is None else kind.TrainingOptions(checkpoint=refiner_checkpoint),
            dtype=torch.float32,
            generator=torch.Generator().manual_seed(0),
        ),
    )
    if shaken and made.refiner_network is not None:
        random = torch.Generator().manual_seed(1)
        for weight in made.refiner_network.parameters():
            weight.data.copy_(torch.empty(weight.shape).normal_(std=0.2, generator=random))
    return made


def answer(target, prompt=PROMPT, count=40):
    return list(Decoder(target).generate(prompt, max_new_tokens=count, stop_ids=()).token_ids)


def read(made, texts):
    row = pack([Text(*text) for text in texts], made.target.device)
    return ComputedStates(made.target, made.tap_layers).read((), row)


def ask(made, row, anchors, decay=4.0):
    blocks = Blocks(row.text, anchors, made.block_size)
    weights = torch.exp(-torch.arange(made.block_size - 1) / decay) * blocks.has_label()
    return Task(Questions(blocks, weights), float(weights.sum()), int((weights > 0).sum()))


@pytest.mark.parametrize("shortlist", [None, 40])
@pytest.mark.parametrize("name", REFINERS)
def test_against_a_loop(tiny_target, name, shortlist):
    """Every labelled slot by itself: what the target says one position before, the true token before it."""
    columns = None if shortlist is None else torch.arange(30, 30 + shortlist)
    made = trainable(tiny_target, REFINERS[name], columns, backbone_weight=0.5)
    prompts = [PROMPT, [2, *b"Ben"]]
    texts = [(prompt, answer(tiny_target, prompt, 20)) for prompt in prompts]
    row = read(made, texts)
    task = ask(made, row, [26, 30, 45, 50, 58])
    found = made(task, row)

    flat = [token for prompt, written in texts for token in prompt + written]
    ends = [len(texts[0][0]) + 20, len(flat)]
    keep = slice(None) if columns is None else columns
    total = 0.0
    with torch.no_grad():
        hidden, normed = made._draft(row, task.questions.blocks)
        for block, anchor in enumerate(task.questions.blocks.anchors):
            end = ends[0] if anchor < ends[0] else ends[1]
            for slot in range(1, made.block_size):
                place = anchor + slot
                if place >= end:
                    continue
                p = tiny_target.project(row.normed[place - 1])[keep].log_softmax(-1)
                own_logits = tiny_target.project(normed[block, slot - 1])
                own = kl(p, own_logits[keep])
                value = own
                if made.refiner is not None:
                    before = torch.tensor(flat[place - made.refiner.history : place], device=p.device)
                    logits = refined(
                        made, hidden[block, slot - 1], normed[block, slot - 1], before, own_logits
                    )
                    value = kl(p, logits[keep]) + 0.5 * own
                total += float(torch.exp(torch.tensor(-(slot - 1) / 4.0)) * value)
    assert float(found.detach()) == pytest.approx(total, rel=1e-4)


def refined(made, hidden, normed, before, own_logits):
    """The refined logits as decoding defines them."""
    network = made.refiner.network
    if isinstance(made.refiner, Bilinear):
        query = network.predecessor(before[0]) * network.projection(normed)
        return own_logits + network.successor.weight @ query
    change = made.refiner.correction(
        made.target.embed(before)[None, None], normed[None, None], torch.tensor([0])
    )
    return made.target.project(made.network.norm(hidden + change[0, 0]))


def kl(log_p, logits):
    return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum()


@pytest.mark.parametrize("name", ["swiglu", "two-token", "linear", "bilinear"])
def test_an_untrained_refiner_changes_nothing(tiny_target, name):
    alone, both = (
        trainable(tiny_target),
        trainable(tiny_target, REFINERS[name], shaken=False, backbone_weight=0.0),
    )
    row = read(alone, [(PROMPT, answer(tiny_target))])
    values = [float(made(ask(made, row, [26, 40]), row).detach()) for made in (alone, both)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_a_frozen_backbone_gets_no_gradient_and_its_own_loss_does_not_count(tiny_target):
    frozen = trainable(tiny_target, SwiGlu, frozen=True)
    free = trainable(tiny_target, SwiGlu, backbone_weight=0.0)
    row = read(frozen, [(PROMPT, answer(tiny_target))])
    values = [made(ask(made, row, [26, 40]), row) for made in (frozen, free)]
    assert float(values[0].detach()) == pytest.approx(float(values[1].detach()), rel=1e-6)
    for value in values:
        value.backward()
    assert all(weight.grad is None for weight in frozen.network.parameters())
    assert all(weight.grad is not None for weight in free.network.parameters())
    assert all(weight.grad is not None for weight in frozen.refiner_network.parameters())


def test_asking(tiny_target):
    """Anchors per text, weights by slot, nothing past a text's end."""
    made = trainable(tiny_target, anchors=6)
    text = PackedText.pack([([1] * 4, [5] * 20), ([1] * 2, [5] * 3)], tiny_target.device)
    task = made.ask(text, [torch.Generator().manual_seed(number) for number in range(2)])
    assert len(task.questions.blocks.anchors) == 6 + 3
    labelled = task.questions.blocks.has_label()
    expected = torch.exp(-torch.arange(7) / 4.0) * labelled
    torch.testing.assert_close(task.questions.weights, expected)
    assert task.positions == int(labelled.sum())
    assert task.weight == pytest.approx(float(expected.sum()))
    flat = trainable(tiny_target, anchors=6, decay=0.0).ask(text, [torch.Generator(), torch.Generator()])
    assert set(flat.questions.weights.unique().tolist()) <= {0.0, 1.0}


@torch.no_grad()
def test_simulation_counts_what_a_chain_would_accept(tiny_target):
    made = trainable(tiny_target, SwiGlu)
    texts = [(PROMPT, answer(tiny_target, count=60))]
    row = read(made, texts)
    task = ask(made, row, [26, 30, 41, 60, 83])
    measured = made.simulate(task, row)
    flat = [token for prompt, written in texts for token in prompt + written]
    hidden, normed = made._draft(row, task.questions.blocks)
    for name in ("backbone", "refined"):
        hits, rows, distance, blocks, emitted = [0] * 7, [0] * 7, [0.0] * 7, 0, 0
        for block, anchor in enumerate(task.questions.blocks.anchors):
            still, length = True, 1
            for slot in range(1, 8):
                place = anchor + slot
                if place >= len(flat):
                    continue
                logits = own = tiny_target.project(normed[block, slot - 1])
                if name == "refined":
                    before = torch.tensor(flat[place - 1 : place], device=own.device)
                    logits = refined(made, hidden[block, slot - 1], normed[block, slot - 1], before, own)
                hit = int(logits.argmax()) == flat[place]
                p = tiny_target.project(row.normed[place - 1]).softmax(-1)
                rows[slot - 1] += 1
                hits[slot - 1] += hit
                distance[slot - 1] += float((p - logits.softmax(-1)).abs().sum() / 2)
                still = still and hit
                length += still
            # The target's own token comes after those accepted, if the text goes on.
            blocks, emitted = blocks + 1, emitted + min(length, len(flat) - 1 - anchor)
        found = measured[name]
        assert found.rows.tolist() == rows
        assert found.hits.tolist() == hits
        assert found.divergence.tolist() == pytest.approx(distance, rel=1e-3)
        assert (found.blocks, found.emitted) == (blocks, emitted)
        assert found.summary()["block_efficiency"] == pytest.approx(emitted / blocks, abs=1e-4)
        doubled = (found + found).summary()
        assert doubled == found.summary()


def test_on_policy_contexts_are_the_drafters_own_and_labelled_by_the_target(tiny_target):
    """Each node against a pass of the target over its own path."""
    from treeflash.components.trainables import dflash, on_policy

    made = trainable(tiny_target, TwoToken, previous="tree", tree_budget=6)
    texts = [(PROMPT, answer(tiny_target, count=30)), ([2, *b"Ben"], answer(tiny_target, [2, *b"Ben"], 20))]
    row = read(made, texts)
    anchors = [26, 40, 60, 70]
    task, seen = ask(made, row, anchors), []
    original = on_policy.own_contexts

    def record(*args):
        seen.append((args, original(*args)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash, "own_contexts", record)
        value = made(task, row)
    value.backward()
    assert torch.isfinite(value)
    _, nodes = seen[0]
    assert set(nodes.block.tolist()) == {0, 1, 2, 3}
    roots = (nodes.slot == 0).nonzero()[:, 0]
    assert len(roots) == 4
    starts = [0, 0, len(PROMPT) + 30, len(PROMPT) + 30]
    for root in roots.tolist():
        block = int(nodes.block[root])
        assert (
            nodes.previous[root].tolist()
            == row.text.token_ids[anchors[block] - 1 : anchors[block] + 1].tolist()
        )
        torch.testing.assert_close(nodes.wanted[root], row.normed[anchors[block]], atol=1e-4, rtol=1e-4)
    for node in (nodes.slot == 1).nonzero()[:, 0].tolist():
        block = int(nodes.block[node])
        prefix = row.text.token_ids[starts[block] : anchors[block] + 1].tolist()
        assert int(nodes.previous[node, 0]) == prefix[-1]
        ids = torch.tensor([[*prefix, int(nodes.previous[node, 1])]], device=tiny_target.device)
        last = (tiny_target.num_layers - 1,)
        state = tiny_target.prefill(tiny_target.start(1, 128, last), ids).taps[0, -1]
        torch.testing.assert_close(nodes.wanted[node], state, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["swiglu", "linear", "bilinear"])
def test_a_trained_start_is_taken_over(tiny_target, tmp_path, name):
    """What `write` writes is what a recipe with that checkpoint starts from."""
    made = trainable(tiny_target, REFINERS[name])
    tables = made.write(tmp_path)
    assert tables["refiner"] == {"use": name}
    again = DFlashTrainable.from_options(
        DFlashTrainingOptions(checkpoint=str(tmp_path)),
        TrainContext(
            target=tiny_target,
            locate=locate,
            loss=ForwardKl(),
            columns=None,
            frequent=lambda size: torch.arange(size),
            refiner=REFINERS[name],
            refiner_options=attrs.evolve(REFINERS[name].TrainingOptions(), checkpoint=str(tmp_path)),
            dtype=torch.float32,
            generator=torch.Generator(),
        ),
    )
    for key, weight in made.state_dict().items():
        assert torch.equal(weight, again.state_dict()[key]), key
    assert again.config == json.loads((tmp_path / "config.json").read_text())


def test_a_refiner_starts_anew_where_it_is_told_to(tiny_target):
    """The checkpoint's own is left alone, and what it would have drafted is forgotten."""
    shipped = "treeflash.testing:models/tiny-treeflash"
    kept, anew = (
        trainable(tiny_target, SwiGlu, shaken=False, checkpoint=shipped, fresh_refiner=fresh)
        for fresh in (False, True)
    )
    for key, weight in kept.network.state_dict().items():
        assert torch.equal(weight, anew.network.state_dict()[key]), key
    row = read(anew, [(PROMPT, answer(tiny_target))])
    anchors = [len(PROMPT) + 3, len(PROMPT) + 9]
    for made, equal in ((kept, False), (anew, True)):
        found = made.simulate(ask(made, row, anchors), row)
        assert torch.equal(found["refined"].divergence, found["backbone"].divergence) == equal


@pytest.mark.parametrize(
    ("checkpoint", "refiner"), [(None, None), ("treeflash.testing:models/tiny-treeflash",) * 2]
)
def test_nothing_to_start_anew_is_refused(tiny_target, checkpoint, refiner):
    """No refiner is there to be left alone, or the recipe names one."""
    with pytest.raises(CompositionError, match=r"drafter\.fresh_refiner: expected a drafter\.checkpoint"):
        trainable(tiny_target, SwiGlu, checkpoint=checkpoint, fresh_refiner=True, refiner_checkpoint=refiner)


def test_measured_is_what_can_be_drafted(tiny_target):
    """Over a shortlist alone, as the drafter scores it: what is not on it cannot be the likeliest."""
    logits = torch.full((2, tiny_target.vocab_size), -30.0)
    logits[0, [5, 7]] = torch.tensor([9.0, 8.0])
    logits[1, [7, 6]] = torch.tensor([9.0, 8.0])
    given = {"mine": Lesson((logits,), (), lambda head, rows: rows)}
    wanted, left = torch.zeros(2, tiny_target.hidden_size), torch.tensor([2])
    head = tiny_target.head(None, torch.float32)
    for columns, hits in ((None, [0, 1]), (torch.tensor([6, 7]), [1, 1])):
        found = measure(tiny_target, head, wanted, torch.tensor([[7, 7]]), given, left, columns)["mine"]
        assert found.hits.tolist() == hits
        own = (
            logits
            if columns is None
            else torch.full_like(logits, -torch.inf).index_copy(1, columns, logits[:, columns])
        )
        apart = (tiny_target.finish(head(wanted)).softmax(-1) - own.softmax(-1)).abs().sum(-1) / 2
        torch.testing.assert_close(found.divergence, apart.double(), rtol=1e-5, atol=1e-5)


def test_on_policy_trees_hold_listed_tokens_alone(tiny_target, monkeypatch):
    """As those do that the drafter will be asked for when it decodes."""
    from treeflash.components.trainables import dflash, on_policy

    columns = torch.arange(30, 70)
    made = trainable(tiny_target, SwiGlu, columns, previous="tree", tree_budget=6)
    row = read(made, [(PROMPT, answer(tiny_target))])
    seen = []
    original = on_policy.own_contexts

    def spy(*given):
        nodes = original(*given)
        # Behind the anchor, a token of the text, stand tokens of the tree.
        seen.append(nodes.previous[nodes.slot > 0])
        return nodes

    monkeypatch.setattr(dflash, "own_contexts", spy)
    made(ask(made, row, [28, 33, 40]), row)
    assert seen[0].numel() > 0
    assert bool(torch.isin(seen[0], columns).all())


def perfect(target, row):
    """The distribution of a drafter that knows the text."""
    labels = row.text.token_ids

    def known(blocks):
        ids = labels[blocks.rows()[:, 1:]].flatten()
        sure = torch.full((len(ids), target.vocab_size), -30.0, device=ids.device)
        return Lesson((sure.scatter(1, ids[:, None], 0.0),), (), lambda head, rows: rows)

    return known


@pytest.mark.parametrize(("tokens", "right"), [(1, 1.0), (2, 1.5), (3, 2.0), (5, 3.0), (12, 50 / 12)])
def test_nothing_past_the_end_of_a_text_is_counted(tiny_target, tokens, right):
    """A perfect drafter of 4 levels, from every place of an answer."""
    made = trainable(tiny_target)
    text = (PROMPT, answer(tiny_target, count=tokens))
    row = read(made, [text])
    anchors = range(len(PROMPT) - 1, len(PROMPT) + tokens - 1)
    blocks = Blocks(row.text, list(anchors), 5)
    rows = blocks.rows()
    given = {"mine": perfect(tiny_target, row)(blocks)}
    head, wanted = tiny_target.head(None, torch.float32), row.normed[rows[:, :-1]].flatten(0, 1)
    labels = row.text.token_ids[rows[:, 1:]]
    found = measure(tiny_target, head, wanted, labels, given, blocks.left())["mine"]
    assert found.summary()["block_efficiency"] == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("name", REFINERS)
def test_simulation_emits_what_steps_decode(name, tiny_target, tmp_path):
    """From every place of texts of several lengths, the drafter it wrote emits as much in a step, in all."""
    made = trainable(tiny_target, REFINERS[name])
    made.write(tmp_path)
    drafter, kind = DFlash.from_checkpoint(tmp_path, tiny_target), REFINERS[name]
    refined = None if kind is None else (TopM(), kind.from_checkpoint(tmp_path, tiny_target))
    decoder = Decoder(tiny_target, drafter, *(refined or (Marginal(), NoRefiner())))
    simulated, decoded = 0.0, 0
    for count in (1, 2, 7, 8, 9, 30):
        text = (PROMPT, answer(tiny_target, count=count))
        row = read(made, [text])
        ids = row.text.token_ids
        places = list(range(len(PROMPT) - 1, len(ids) - 1))
        *_, found = made.simulate(ask(made, row, places), row).values()
        assert found.blocks == len(places)
        simulated += found.emitted
        decoded += sum(chain_steps(decoder, tiny_target, ids, places))
    assert simulated == decoded
