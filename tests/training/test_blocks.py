"""Labels, masks and visibility against loops written out, and training drafts against inference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.components.drafters.dflash import DFlash
from treeflash.components.trainables.blocks import Blocks, draw_anchors, position_weights
from treeflash.packed_text import PackedText
from treeflash.types import Limits


@st.composite
def packed(draw):
    sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 8)), min_size=1, max_size=3))
    start, texts = 0, []
    for prompt, answer in sizes:
        ids = list(range(start, start + prompt + answer))
        texts.append((ids[:prompt], ids[prompt:]))
        start += prompt + answer
    return texts, PackedText.pack(texts)


def generators(count, seed=0):
    return [torch.Generator().manual_seed(seed + number) for number in range(count)]


def visibility(blocks, text):
    """All pieces in one mask, `[A * block_size, S + A * block_size]`."""
    count, width = len(blocks.anchors) * blocks.block_size, text.token_ids.shape[0]
    whole = torch.zeros(count, width + count, dtype=torch.bool)
    covered = []
    for piece in blocks.pieces():
        context = piece.context.stop - piece.context.start
        whole[piece.slots, piece.context] = piece.visible[:, :context]
        whole[piece.slots, width + piece.slots.start : width + piece.slots.stop] = piece.visible[:, context:]
        covered += range(piece.slots.start, piece.slots.stop)
    assert covered == list(range(count))
    return whole


@given(case=packed(), size=st.integers(2, 6), seed=st.integers(0, 100), count=st.integers(1, 30))
def test_against_loops(case, size, seed, count):
    texts, text = case
    anchors = draw_anchors(text, count, generators(len(texts), seed))
    flat = [
        (number, place, place >= len(prompt), len(prompt) + len(answer))
        for number, (prompt, answer) in enumerate(texts)
        for place in range(len(prompt) + len(answer))
    ]
    # An anchor is followed by a token that the target wrote.
    eligible = [
        index
        for index, (number, place, _, length) in enumerate(flat)
        if place + 1 < length and flat[index + 1][2]
    ]
    assert set(anchors) <= set(eligible)
    for number in range(len(texts)):
        mine = [index for index in eligible if flat[index][0] == number]
        assert len(set(anchors) & set(mine)) == min(count, len(mine))

    blocks = Blocks(text, anchors, size)
    rows, visible, labelled = blocks.rows(), visibility(blocks, text), blocks.has_label()
    for block, anchor in enumerate(anchors):
        number, place, _, length = flat[anchor]
        assert blocks.positions()[block].tolist() == [place + slot for slot in range(size)]
        for slot in range(size):
            seen = visible[block * size + slot]
            context = [index for index in range(len(flat)) if flat[index][0] == number and index < anchor]
            own = [len(flat) + block * size + other for other in range(size)]
            assert seen.nonzero()[:, 0].tolist() == context + own
            if slot > 0:
                exists = place + slot < length
                assert bool(labelled[block, slot - 1]) == exists
                if exists:
                    # Token ids count up along the row: the label is the token at the slot's own place.
                    assert int(text.token_ids[rows[block, slot]]) == anchor + slot


def test_anchors_are_redrawn_and_reproducible():
    text = PackedText.pack([([1] * 4, [2] * 60)])
    assert draw_anchors(text, 8, generators(1)) == draw_anchors(text, 8, generators(1))
    once = generators(1)
    assert draw_anchors(text, 8, once) != draw_anchors(text, 8, once)


def test_a_text_is_asked_the_same_however_it_is_packed():
    texts = [([1] * 3, [2] * 30), ([1] * 5, [2] * 40)]
    alone = [
        draw_anchors(PackedText.pack([one]), 8, [generator])
        for one, generator in zip(texts, generators(2), strict=True)
    ]
    together = draw_anchors(PackedText.pack(texts), 8, generators(2))
    assert together == [*alone[0], *(33 + anchor for anchor in alone[1])]


def test_many_blocks_are_computed_in_groups_that_see_no_more_than_they_need():
    text = PackedText.pack([([1] * 3, [2] * 90), ([1] * 3, [2] * 20)])
    pieces = Blocks(text, draw_anchors(text, 50, generators(2)), 4).pieces()
    assert len(pieces) == 4 + 2
    for piece in pieces:
        assert piece.visible[:, : piece.context.stop - piece.context.start].any(dim=0).all()


def test_position_weights():
    assert position_weights(3, None).tolist() == [1, 1, 1]
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, 0.7788, 0.6065], abs=1e-4)


def test_blocks_in_training_are_the_drafts_of_inference(tiny_target, models):
    """Same context, positions and visibility: the hidden states of both are the same numbers."""
    dflash = DFlash.from_checkpoint(models / "tiny-treeflash", tiny_target)
    dflash.bind(tiny_target)
    device, size = tiny_target.device, dflash.facts.block_size
    texts = [
        ([2, *b"Ana has 7 apples."], list(b" Ana buys 2 apples, so now Ana has 9 apples.")),
        ([2, *b"Ben has 3"], list(b" coins. Ben loses 1 coins")),
    ]
    text = PackedText.pack(texts)
    with torch.inference_mode():
        taps, drafts = [], []
        anchors = [16, 20, 40, 70, 75]
        for number, (prompt, answer) in enumerate(texts):
            ids = torch.tensor([prompt + answer], device=device)
            taps.append(tiny_target.prefill(tiny_target.start(1, 128, dflash.tap_layers), ids).taps)
            for anchor in anchors:
                place = int(text.positions[anchor])
                if int(text.text_of[anchor]) == number:
                    memory = dflash.start(1, 128)
                    dflash.extend(memory, ids[:, :place], taps[-1][:, :place], torch.tensor([place]))
                    recent = ids[:, place - 1 : place + 1]
                    drafts.append(dflash.propose(memory, recent, Limits(size, size)).hidden[0])
        blocks = Blocks(PackedText.pack(texts, device), anchors, size)
        pieces = blocks.pieces()
        masks = torch.full((len(anchors), size - 1), dflash.facts.mask_token_id)
        slots = torch.cat([text.token_ids[anchors][:, None], masks], dim=1).to(device)
        hidden, _ = dflash.network.forward_blocks(
            tiny_target.embed(slots).flatten(0, 1)[None],
            torch.cat(taps, dim=1),
            blocks.positions().flatten()[None],
            text.positions[None].to(device),
            pieces,
        )
    found = hidden[0].unflatten(0, (len(anchors), size))[:, 1:]
    torch.testing.assert_close(found, torch.stack(drafts), atol=2e-4, rtol=1e-4)
