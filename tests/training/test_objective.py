"""The objective against a loop over slots, and learning that shows in decoding."""

import pytest
import torch

from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.linear import Linear, LinearNetwork
from treeflash.components.refiners.swiglu import SwiGlu, SwiGluNetwork
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.training.blocks import Blocks, PackedText, draw_anchors
from treeflash.training.losses import CrossEntropy, ForwardKl
from treeflash.training.objective import Objective, ReadText

PROMPT = [2, *b"Gus has 12 pens. Gus finds"]


@pytest.fixture
def dflash(tiny_target, models):
    return DFlash.from_checkpoint(models / "tiny-treeflash", tiny_target)


def read(target, dflash, texts):
    """Reads each text by itself, with the final normed state as one more tap."""
    taps = (*dflash.tap_layers, target.num_layers - 1)
    outputs = []
    for prompt, answer in texts:
        ids = torch.tensor([prompt + answer], device=target.device)
        state = target.start(1, ids.shape[1], taps)
        outputs.append(target.prefill(state, ids).taps[0])
    both = torch.cat(outputs)
    width = target.hidden_size
    packed = PackedText.pack(texts)
    parts = (packed.token_ids, packed.text_of, packed.positions, packed.is_answer)
    text = PackedText(*(part.to(target.device) for part in parts))
    return ReadText(text, both[:, :-width], both[:, -width:])


def answer(target, prompt=PROMPT, count=40):
    return list(Decoder(target).generate(prompt, max_new_tokens=count, stop_ids=()).token_ids)


def refiners(target):
    torch.manual_seed(0)
    width = target.hidden_size
    made = [SwiGlu(SwiGluNetwork(width, 16, 1)), TwoToken(SwiGluNetwork(width, 16, 2))]
    made.append(Linear(LinearNetwork(width)))
    for refiner in made:
        refiner.network.to(target.device)
        for tensor in refiner.network.parameters():
            torch.nn.init.normal_(tensor, std=0.2)
    return made


@pytest.mark.parametrize("number", range(4))
def test_against_a_loop(tiny_target, dflash, number):
    """Every labelled slot by itself: what the target says one position before, the true token before it."""
    refiner = ([None, *refiners(tiny_target)])[number]
    prompts = [PROMPT, [2, *b"Ben"]]
    texts = [(prompt, answer(tiny_target, prompt, 20)) for prompt in prompts]
    row = read(tiny_target, dflash, texts)
    blocks = Blocks(torch.tensor([26, 30, 45, 50, 58], device=tiny_target.device), 8)
    found = Objective(ForwardKl(), 4.0, 0.5)(dflash.network, refiner, tiny_target, row, blocks, 1)

    with torch.no_grad():
        hidden, normed = drafts(tiny_target, dflash, row, blocks)
        total = weight = torch.zeros(())
        flat = [token for prompt, written in texts for token in prompt + written]
        ends = [len(texts[0][0]) + 20, len(flat)]
        for block, anchor in enumerate(blocks.anchors.tolist()):
            end = ends[0] if anchor < ends[0] else ends[1]
            for slot in range(1, 8):
                place = anchor + slot
                if place >= end:
                    continue
                p = tiny_target.project(row.normed[place - 1]).log_softmax(-1)
                factor = torch.exp(torch.tensor(-(slot - 1) / 4.0))
                own = kl(p, tiny_target.project(normed[block, slot]))
                value = own
                if refiner is not None:
                    before = torch.tensor(flat[place - refiner.history : place], device=p.device)
                    change = refiner.correction(
                        tiny_target.embed(before)[None, None],
                        normed[block, slot][None, None],
                        torch.tensor([0]),
                    )[0, 0]
                    corrected = dflash.network.norm(hidden[block, slot] + change)
                    value = kl(p, tiny_target.project(corrected)) + 0.5 * own
                total, weight = total + factor * value.cpu(), weight + factor
    assert float(found.detach()) == pytest.approx(float(total / weight), rel=1e-4)


def drafts(target, dflash, row, blocks):
    text = row.text
    slots = torch.full((len(blocks.anchors), 8), 1, device=target.device)
    slots[:, 0] = text.token_ids[blocks.anchors]
    hidden, normed = dflash.network.forward_blocks(
        target.embed(slots).flatten(0, 1)[None],
        row.taps[None],
        blocks.positions(text).flatten()[None],
        text.positions[None],
        blocks.visibility(text),
    )
    return hidden[0].unflatten(0, (-1, 8)), normed[0].unflatten(0, (-1, 8))


def kl(log_p, logits):
    return (log_p.exp() * (log_p - logits.log_softmax(-1))).sum()


@pytest.mark.parametrize(
    "make", [lambda width: SwiGlu(SwiGluNetwork(width, 16, 1)), lambda width: Linear(LinearNetwork(width))]
)
def test_an_untrained_refiner_changes_nothing(tiny_target, dflash, make):
    refiner = make(tiny_target.hidden_size)
    refiner.network.to(tiny_target.device)
    row = read(tiny_target, dflash, [(PROMPT, answer(tiny_target))])
    blocks = Blocks(torch.tensor([26, 40], device=tiny_target.device), 8)
    objective = Objective(ForwardKl(), backbone_weight=0.0)
    arguments = (tiny_target, row, blocks, 1)
    alone, refined = (objective(dflash.network, part, *arguments) for part in (None, refiner))
    assert float(alone.detach()) == pytest.approx(float(refined.detach()), rel=1e-6)


@pytest.mark.parametrize("loss", [ForwardKl(), CrossEntropy()], ids=["kl", "ce"])
def test_one_text_can_be_learned_and_drafted_whole(tiny_target, dflash, loss):
    """What is learned is what decoding uses: nearly every step accepts the whole block."""
    written = answer(tiny_target, count=57)
    row = read(tiny_target, dflash, [(PROMPT, written)])
    network = dflash.network.requires_grad_(True)
    refiner = SwiGlu(SwiGluNetwork(tiny_target.hidden_size, 64, 1))
    refiner.network.to(tiny_target.device)
    weights = [*network.parameters(), *refiner.network.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    objective = Objective(loss, decay=None)
    for _ in range(150):
        blocks = Blocks(draw_anchors(row.text, 24, generator), 8)
        optimizer.zero_grad()
        objective(network, refiner, tiny_target, row, blocks, dflash.facts.mask_token_id).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    network.requires_grad_(False)
    refiner.network.requires_grad_(False)
    # By KL it learns too where the target hesitates: the tree must have room for what was not written.
    decoder = Decoder(tiny_target, dflash, TopM(8, 8), refiner, OptTree(100))
    result = decoder.generate(PROMPT, max_new_tokens=57, stop_ids=())
    assert list(result.token_ids) == written
    assert result.statistics.block_efficiency > 0.9 * dflash.facts.block_size
