"""Drafting against the head written out, and what batches, deep trees and options make of it."""

import attrs
import pytest
import torch
from treeflash_eagle3.drafter import Eagle3, Eagle3Options

from treeflash import room
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.interfaces import BuildContext
from treeflash.places import locate
from treeflash.types import Limits

TEXT = [2, *b"Ana has 7 apples. Ana buys 2"]


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def drafter(golden, tiny_target):
    made = Eagle3.from_checkpoint(golden / "tiny-eagle3", tiny_target, children=5, max_depth=4)
    made.bind(tiny_target)
    return made


@pytest.fixture(scope="module")
def taps():
    """Random features: what a head makes of them does not depend on who made them."""
    return torch.randn(2, 40, 192, generator=torch.Generator().manual_seed(0))


def explored(drafter, state, recent, budget=12, beam=4):
    limits = Limits(budget, drafter.max_depth)
    tree = OptTree(budget, beam=beam).select(drafter.propose(state, recent, limits), limits)
    tree.validate()
    return [
        dict(zip(tree.paths(row), tree.log_weights[row, 1:].tolist(), strict=False))
        for row in range(len(recent))
    ]


def test_every_level_against_the_head_written_out(drafter, taps, tiny_target, slow_head, slow_logits):
    """Siblings, cousins and single children, down to the last level."""
    count, ids = len(TEXT) - 1, drafter.network.target_ids()
    state = drafter.start(1, 64)
    drafter.extend(state, torch.tensor([TEXT[:-1]]), taps[:1, :count], torch.tensor([count]))
    draft = drafter.propose(state, torch.tensor([TEXT[-2:]]), Limits(12, drafter.max_depth))
    chosen = [[0, 2, 4], [1, 0, 12, 7], [3, 19, 8]]  # of the children, level by level
    handles, paths = draft.root(), [()]
    for depth in range(1, drafter.max_depth + 1):
        children = draft.children(depth, handles)
        assert children.token_ids.shape == (1, len(paths), drafter.children)
        for node, path in enumerate(paths):
            outputs = slow_head(drafter.network, tiny_target, taps[0, :count], TEXT, list(path))
            best = slow_logits(drafter.network, outputs[-1]).log_softmax(dim=-1).topk(drafter.children)
            torch.testing.assert_close(children.log_probs[0, node], best.values, atol=2e-5, rtol=0)
            assert children.token_ids[0, node].tolist() == ids[best.indices].tolist()
        if depth < drafter.max_depth:
            picked, width = chosen[depth - 1], drafter.children
            tokens = children.token_ids[0].flatten().tolist()
            paths = [(*paths[child // width], tokens[child]) for child in picked]
            handles = children.handles.flatten(1)[:, picked]
    assert bool((children.handles == -1).all())


def test_sequences_of_a_batch_may_differ_in_length(drafter, taps):
    """Padding behind the shorter one's tokens changes nothing, at the start and later on."""
    texts = torch.randint(3, 120, (2, 40), generator=torch.Generator().manual_seed(1))
    state = drafter.start(2, 64)
    lengths = torch.zeros(2, dtype=torch.int64)
    for counts in (torch.tensor([12, 9]), torch.tensor([1, 4]), torch.tensor([3, 3])):
        widest = int(counts.max())
        places = lengths[:, None] + torch.arange(widest)
        batch = torch.arange(2)[:, None]
        drafter.extend(state, texts[batch, places], taps[batch, places], counts)
        lengths = lengths + counts
        recent = torch.stack([texts[row, lengths[row] - 1 : lengths[row] + 1] for row in range(2)])
        together = explored(drafter, state, recent)
        for row in range(2):
            alone = drafter.start(1, 64)
            count = int(lengths[row])
            pieces = texts[row : row + 1, :count], taps[row : row + 1, :count], lengths[row : row + 1]
            drafter.extend(alone, *pieces)
            (expected,) = explored(drafter, alone, recent[row : row + 1])
            assert together[row] == pytest.approx(expected, abs=1e-4)


def test_a_tree_larger_than_the_room_left_is_drafted_all_the_same(drafter, taps):
    """The cache has room for the text; what a wide beam needs beside it is made."""
    found = []
    for capacity in (21, 400):
        state = drafter.start(1, capacity)
        drafter.extend(state, torch.tensor([TEXT[:20]]), taps[:1, :20], torch.tensor([20]))
        found.append(explored(drafter, state, torch.tensor([TEXT[19:21]]), budget=60, beam=40)[0])
        grown = state.cache.shape[3] - (capacity + 1)
        assert grown > 0 if capacity == 21 else grown == 0
    assert found[0] == pytest.approx(found[1], abs=1e-5)


def test_more_children_than_the_draft_vocabulary_gives_all_of_it(golden, tiny_target, taps):
    drafter = Eagle3.from_checkpoint(golden / "tiny-eagle3", tiny_target, children=500)
    drafter.bind(tiny_target)
    state = drafter.start(1, 64)
    drafter.extend(state, torch.tensor([TEXT[:20]]), taps[:1, :20], torch.tensor([20]))
    recent, root = torch.tensor([TEXT[19:21]]), torch.zeros(1, 1).long()
    assert drafter.propose(state, recent, Limits(8, 1)).children(1, root).token_ids.shape == (1, 1, 8)
    children = drafter.propose(state, recent, Limits(500, 1)).children(1, root)
    assert sorted(children.token_ids[0, 0].tolist()) == drafter.network.target_ids().tolist()
    assert float(children.log_probs.exp().sum()) == pytest.approx(1, abs=1e-5)
    assert bool((children.handles == -1).all())


def test_options_reach_the_drafter(golden, tiny_target):
    options = Eagle3Options(str(golden / "tiny-eagle3"), children=3, max_depth=2, rope_theta=5e5)
    made = Eagle3.from_options(options, BuildContext(tiny_target, locate))
    assert (made.children, made.max_depth) == (3, 2)
    assert made.network.config.rope_parameters["rope_theta"] == 5e5
    plain = Eagle3.from_options(attrs.evolve(options, rope_theta=None), BuildContext(tiny_target, locate))
    assert plain.network.config.rope_parameters["rope_theta"] == 1e4
    positions = torch.arange(8)[None]
    like = torch.zeros(1, 8, 64)
    assert not torch.allclose(*(drafter.network.rotary(like, positions)[0] for drafter in (made, plain)))


def test_the_usual_layers_are_read_for_any_depth_of_target(files, tmp_path, tiny_target):
    assert Eagle3.from_checkpoint(files.write(tmp_path), tiny_target).tap_layers == (1, 1, 0)
    files.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert Eagle3.from_checkpoint(files.write(tmp_path), tiny_target).tap_layers == (0, 1, 2)


def test_a_beam_of_eagles_width_decodes_the_targets_own_text(golden, tiny_target):
    drafter = Eagle3.from_checkpoint(golden / "tiny-eagle3", tiny_target)
    told = {"max_new_tokens": 40, "stop_ids": ()}
    plain = Decoder(tiny_target).generate(TEXT, **told).token_ids
    found = Decoder(tiny_target, drafter, selector=OptTree(59, beam=10)).generate(TEXT, **told)
    assert found.token_ids == plain
    assert all(step.tree_depth <= 8 for step in found.statistics.steps)


def test_room_is_made_as_the_text_grows(golden, tiny_target, monkeypatch):
    drafter, found = Eagle3.from_checkpoint(golden / "tiny-eagle3", tiny_target), []
    decoder = Decoder(tiny_target, drafter, selector=OptTree(20))
    for block in (4, 1024):
        monkeypatch.setattr(room, "_BLOCK", block)
        generation = decoder.generate(TEXT, max_new_tokens=60, stop_ids=())
        steps = generation.statistics.steps
        found.append((generation.token_ids, [step.num_accepted for step in steps]))
    assert found[0] == found[1]
    assert drafter.start(1, 10**13).states.shape[1] == 1024
