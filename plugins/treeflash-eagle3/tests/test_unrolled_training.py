"""What is learned against a loop over positions that runs the head on explicit sequences."""

from itertools import pairwise

import pytest
import torch
from treeflash_eagle3.drafter import Eagle3
from treeflash_eagle3.trainable import Eagle3Trainable, Eagle3TrainingOptions
from treeflash_eagle3.unrolling import Roots

from treeflash.components.losses.cross_entropy import CrossEntropy
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.engine import Decoder
from treeflash.engine.chains import chain_steps
from treeflash.errors import CompositionError
from treeflash.packed_text import PackedText, ReadText
from treeflash.places import locate
from treeflash.trainable import TrainContext

PROMPTS = ([2, *b"Ana has 7 coins. Ana"], [2, *b"Ben"], [2])
UNROLL, DECAY = 3, 0.8
# Digits, capitals and the first small letters: some of what the target writes is not among them.
VOCABULARY = torch.arange(32, 112)


def trainable(target, *, loss=None, columns=None, frequent=lambda size: VOCABULARY[:size], **options):
    options = {"draft_vocab_size": len(VOCABULARY), "unroll": UNROLL, "decay": DECAY, **options}
    return Eagle3Trainable.from_options(
        Eagle3TrainingOptions(**options),
        TrainContext(
            target=target,
            locate=locate,
            loss=loss or ForwardKl(),
            columns=columns,
            frequent=frequent,
            refiner=None,
            refiner_options=None,
            dtype=torch.float32,
            generator=torch.Generator().manual_seed(0),
        ),
    )


def shaken(made):
    """Weights that make a difference: first ones are small, and norms are 1."""
    random = torch.Generator().manual_seed(1)
    for weight in made.parameters():
        noise = torch.empty(weight.shape).normal_(std=0.1, generator=random)
        weight.data.add_(noise)
    return made


@pytest.fixture(scope="module")
def texts(tiny_target):
    counts = (9, 6, 5)
    told = {"stop_ids": ()}
    return [
        (prompt, list(Decoder(tiny_target).generate(prompt, max_new_tokens=count, **told).token_ids))
        for prompt, count in zip(PROMPTS, counts, strict=True)
    ]


def read(made, texts):
    target, row = made.target, PackedText.pack(texts)
    layers = (*made.tap_layers, target.num_layers - 1)
    states = target.read(row.token_ids, row.positions, row.causal_visibility(), layers)
    return ReadText(row, states[:, : -target.hidden_size], states[:, -target.hidden_size :])


def links(made, texts, row, slow_head):
    """Each text's roots and links one by one: the depth, the place in the row, and the head's output."""
    begin = 0
    for prompt, answer in texts:
        text, taps = prompt + answer, row.taps[begin : begin + len(prompt) + len(answer)]
        for root in range(max(1, len(prompt) - 1), len(text) - 1):
            behind = text[root + 1 : root + made.options.unroll]
            outputs = slow_head(made.network, made.target, taps[:root], text[: root + 1], behind)
            for depth, output in enumerate(outputs, start=1):
                if root + depth < len(text):
                    yield root == max(1, len(prompt) - 1), depth, begin + root + depth, output
        begin += len(text)


@pytest.mark.parametrize("loss", [ForwardKl(), CrossEntropy()], ids=["kl", "ce"])
def test_loss_and_gradients_against_a_loop(tiny_target, texts, slow_head, slow_logits, loss):
    made = shaken(trainable(tiny_target, loss=loss))
    row = read(made, texts)
    task = made.ask(row.text, [torch.Generator() for _ in texts])
    found = made(task, row)
    found.backward()
    gradients = {name: weight.grad.clone() for name, weight in made.named_parameters()}
    made.zero_grad()

    total, weight, positions, outside = torch.zeros(()), 0.0, 0, 0
    for _, depth, place, output in links(made, texts, row, slow_head):
        counts = DECAY ** (depth - 1)
        weight, positions = weight + counts, positions + 1
        token = int(row.text.token_ids[place])
        if token not in VOCABULARY:
            outside += 1
            continue
        q = slow_logits(made.network, output).log_softmax(dim=-1)
        p = tiny_target.project(row.normed[place - 1]).detach()[VOCABULARY].log_softmax(dim=-1)
        value = (p.exp() * (p - q)).sum() if loss == ForwardKl() else -q[VOCABULARY.tolist().index(token)]
        total = total + counts * value
    total.backward()

    assert outside > 0
    assert task.positions == positions
    assert task.weight == pytest.approx(weight)
    assert float(found.detach()) == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in made.named_parameters():
        scale = float(parameter.grad.abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-5 * scale, rtol=1e-3)


@torch.no_grad()
def test_simulation_counts_what_a_chain_would_accept(tiny_target, texts, slow_head, slow_logits):
    made = shaken(trainable(tiny_target))
    row = read(made, texts)
    (measured,) = made.simulate(made.ask(row.text, [torch.Generator()] * 3), row).values()
    rows, hits, distance = [0] * UNROLL, [0] * UNROLL, [0.0] * UNROLL
    blocks, emitted, still = 0, 0, True
    for _, depth, place, output in links(made, texts, row, slow_head):
        q = slow_logits(made.network, output).softmax(dim=-1)
        hit = int(VOCABULARY[q.argmax()]) == int(row.text.token_ids[place])
        p = tiny_target.project(row.normed[place - 1]).softmax(dim=-1)
        full = torch.zeros_like(p)
        full[VOCABULARY] = q
        rows[depth - 1] += 1
        hits[depth - 1] += hit
        distance[depth - 1] += float((p - full).abs().sum() / 2)
        # One token a step is the target's own, unless the text ends with the drafted ones.
        still = hit and (still or depth == 1)
        blocks, emitted = blocks + (depth == 1), emitted + (depth == 1) + still
        emitted -= still and place + 1 in row.text.bounds
    assert measured.rows.tolist() == rows
    assert measured.hits.tolist() == hits
    assert measured.divergence.tolist() == pytest.approx(distance, rel=1e-4)
    assert (measured.blocks, measured.emitted) == (blocks, emitted)


@torch.no_grad()
def test_simulation_emits_what_steps_decode(tiny_target, texts, tmp_path):
    """From every place of the answers, the head it wrote emits as much in a step, in all."""
    made = shaken(trainable(tiny_target))
    made.write(tmp_path)
    decoder = Decoder(tiny_target, Eagle3.from_checkpoint(tmp_path, tiny_target, max_depth=UNROLL))
    row = read(made, texts)
    task = made.ask(row.text, [torch.Generator()] * len(texts))
    (found,) = made.simulate(task, row).values()
    decoded = 0
    for begin, end in pairwise(row.text.bounds):
        places = [place - begin for place in task.questions.roots.places if begin <= place < end]
        decoded += sum(chain_steps(decoder, tiny_target, row.text.token_ids[begin:end], places))
    assert found.emitted == decoded


def test_roots_stand_where_the_target_wrote_on_and_a_token_has_one_before(tiny_target):
    text = PackedText.pack([([5] * 4, [6] * 3), ([5], [6] * 2), ([5], [6])])
    roots = Roots.everywhere(text, 2)
    assert list(roots.places) == [3, 4, 5, 8]
    assert roots.has_label().tolist() == [[True, True], [True, True], [True, False], [True, False]]
    task = trainable(tiny_target, unroll=2, decay=0.5).ask(text, [torch.Generator()] * 3)
    assert task.questions.weights.tolist() == [[1.0, 0.5], [1.0, 0.5], [1.0, 0.0], [1.0, 0.0]]
    assert (task.weight, task.positions) == (5.0, 6)


def test_a_row_without_roots_costs_nothing(tiny_target):
    made = trainable(tiny_target)
    row = read(made, [([5], [6])])
    task = made.ask(row.text, [torch.Generator()])
    assert (task.weight, task.positions) == (0.0, 0)
    loss = made(task, row)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not any(weight.grad.any() for weight in made.parameters() if weight.grad is not None)
    (measured,) = made.simulate(task, row).values()
    assert (measured.blocks, measured.emitted) == (0, 0)


def test_groups_cover_all_roots_in_order_and_no_text_sees_another():
    text = PackedText.pack([([5] * 3, [6] * 70), ([5] * 2, [6] * 40)])
    roots = Roots.everywhere(text, 2)
    members = [
        index for group in roots.groups() for index in range(*group.members.indices(len(roots.places)))
    ]
    assert members == list(range(len(roots.places)))
    for group in roots.groups():
        context = torch.arange(group.context.start, group.context.stop)
        for place, row in zip(roots.places[group.members], group.visible, strict=True):
            begin = 0 if place < 73 else 73
            assert context[row].tolist() == list(range(begin + 1, place + 1))


def test_first_weights(tiny_target):
    """The output weights are the target's own, and the vocabulary is the one asked for."""
    made = trainable(tiny_target)
    theirs = tiny_target.model.get_output_embeddings().weight
    torch.testing.assert_close(made.network.lm_head.weight, theirs[VOCABULARY], atol=1e-6, rtol=0)
    assert made.network.target_ids().tolist() == VOCABULARY.tolist()
    assert made.network.t2d.nonzero()[:, 0].tolist() == VOCABULARY.tolist()
    assert made.network.config.intermediate_size == tiny_target.config.intermediate_size
    small = trainable(
        tiny_target,
        draft_vocab_size=8,
        intermediate_size=24,
        attention_heads=2,
        key_value_heads=1,
        head_dim=6,
    )
    shapes = {name: list(weight.shape) for name, weight in small.network.named_parameters()}
    assert shapes["midlayer.self_attn.q_proj.weight"] == [12, 128]
    assert shapes["midlayer.self_attn.k_proj.weight"] == [6, 128]
    assert shapes["midlayer.mlp.up_proj.weight"] == [24, 64]
    assert shapes["lm_head.weight"] == [8, 64]


def test_a_shortlist_beside_the_draft_vocabulary_is_a_mistake(tiny_target):
    with pytest.raises(CompositionError, match=r"loss\.shortlist: expected none.*found 9"):
        trainable(tiny_target, columns=torch.arange(9))


def test_heads_that_do_not_share_keys_evenly_are_a_mistake(tiny_target):
    with pytest.raises(CompositionError, match=r"key_value_heads: expected a divisor of the 4.*found 3"):
        trainable(tiny_target, attention_heads=4, key_value_heads=3)
