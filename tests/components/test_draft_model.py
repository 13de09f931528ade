"""A smaller model as drafter: what it reads, how much it drafts, and that the text is the target's own."""

import pytest
import torch

from treeflash.components.drafters.draft_model import DraftModel
from treeflash.components.selectors import chain, opt_tree
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.target import HuggingFaceTarget
from treeflash.testing.families import tiny_model
from treeflash.testing.reference import reference_text
from treeflash.types import Limits

from .draft_model_helpers import VOCAB, drafter_of, extend, model_of, propose


def passes(drafter, monkeypatch):
    """Records what the model reads: tokens of each pass that begins a draft, and of each level."""
    begun, levels = [], []
    model = drafter.model
    prefill, verify = model.prefill, model.verify
    monkeypatch.setattr(
        model, "prefill", lambda state, ids: (begun.append(ids[0].tolist()), prefill(state, ids))[1]
    )
    monkeypatch.setattr(
        model,
        "verify",
        lambda state, tree, first=0: (levels.append(tree.size - first), verify(state, tree, first))[1],
    )
    return begun, levels


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_no_token_is_read_twice(temperature, device, monkeypatch):
    # A drafter that is its own target is often right.
    target = model_of("llama", torch.float64, device, seed=0)
    drafter = DraftModel(HuggingFaceTarget(target.model), depth=3, children=3)
    begun, levels = passes(drafter, monkeypatch)
    prompt = [3, 1, 4, 1, 5]
    result = Decoder(target, drafter, selector=OptTree(6)).generate(
        prompt, max_new_tokens=40, temperature=temperature
    )
    accepted = [step.num_accepted for step in result.statistics.steps]
    assert len(set(accepted)) > 1
    assert begun[0] == [*prompt, result.token_ids[0]]
    text, end = [*prompt, *result.token_ids], len(prompt) + 1
    for ids, step in zip(begun[1:], accepted, strict=False):
        end += step + 1
        # The anchor, and before it a token of the deepest level, which no one went on from.
        assert ids == text[end - len(ids) : end]
        assert len(ids) == (2 if step == 3 else 1)
    assert len(levels) == sum(min(3, 40 - 1 - start) - 1 for start in starts(accepted) if 40 - 1 - start > 1)
    assert max(levels) <= 6


def starts(accepted):
    """Tokens emitted before each step."""
    have = [1]
    for step in accepted[:-1]:
        have.append(have[-1] + step + 1)
    return have


def test_a_level_costs_one_pass_over_its_frontier_alone(device, monkeypatch):
    drafter = drafter_of("llama", torch.float64, device, depth=5, children=4)
    begun, levels = passes(drafter, monkeypatch)
    state = drafter.start(1, 64)
    extend(drafter, state, [3, 1, 4])
    with torch.inference_mode():
        proposal = propose(drafter, state, [3, 1, 4, 1], Limits(9, 5))
        handles = proposal.root()
        for depth, width in ((1, 3), (2, 1), (3, 5), (4, 2), (5, 0)):
            handles = proposal.children(depth, handles).handles.flatten(1)[:, :width]
    # Four levels below the anchor's are read; the last is only written.
    assert (begun, levels) == ([[3, 1, 4, 1]], [3, 1, 4, 2])


def test_children_and_depth_are_those_asked_for(device):
    drafter = drafter_of("llama", torch.float32, device, depth=4, children=2 * VOCAB)
    assert drafter.max_depth == 4
    state = drafter.start(1, 1024)
    extend(drafter, state, [1, 2])
    with torch.inference_mode():
        for depth in (1, 3, 9):
            for nodes, width in ((5, 5), (3 * VOCAB, VOCAB)):  # a small tree has no room for all
                proposal = propose(drafter, state, [1, 2, 3], Limits(nodes, depth))
                assert proposal.depth == min(4, depth)
                assert proposal.children(1, proposal.root()).token_ids.shape == (1, 1, width)


def test_a_tree_that_outgrows_the_room_gets_fewer_levels(device):
    drafter = drafter_of("llama", torch.float32, device, depth=5)
    state = drafter.start(1, 8)
    extend(drafter, state, [1, 2])
    # The first draft makes the room: 8 positions, an anchor, and 4 levels of 2 nodes.
    assert propose(drafter, state, [1, 2, 3], Limits(2, 5)).depth == 5
    wide = propose(drafter, state, [1, 2, 3], Limits(6, 5))
    assert wide.depth == 3
    OptTree(6).select(wide, Limits(6, 5))


def check_lossless(pair, selector, device, **options):
    target = model_of(pair[0], torch.float64, device, seed=0)
    drafter = DraftModel(model_of(pair[1], torch.float64, device), depth=4, children=4)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    result = Decoder(target, drafter, selector=selector).generate(prompt, max_new_tokens=24, **options)
    assert list(result.token_ids) == reference_text(target.model, prompt, 24, **options)


pairs = pytest.mark.parametrize(
    "pair", [("llama", "gpt2"), ("gemma3", "gemma3"), ("gpt2", "llama")], ids="-".join
)
selectors = pytest.mark.parametrize(
    "selector", [OptTree(7), OptTree(12, beam=3), Chain()], ids=["tree", "beam", "chain"]
)


@pairs
@selectors
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_the_targets_own(pair, selector, temperature, device):
    check_lossless(pair, selector, device, temperature=temperature, seed=2)


@pairs
@selectors
def test_levels_with_slots_that_hold_no_node(pair, selector, device, monkeypatch):
    """As on a GPU, where trees are not cut to their nodes: the same on every device."""
    for module in (opt_tree, chain):
        monkeypatch.setattr(module, "trims", lambda device: False)
    check_lossless(pair, selector, device, temperature=0.9, seed=2)


@pytest.mark.parametrize("selector", [OptTree(7), Chain()], ids=["tree", "chain"])
def test_what_the_target_would_write_is_drafted_whole(selector, device):
    target = model_of("gemma3", torch.float64, device, seed=0)
    drafter = DraftModel(target, depth=4, children=2)
    result = Decoder(target, drafter, selector=selector).generate([3, 1, 4], max_new_tokens=26)
    assert list(result.token_ids) == reference_text(target.model, [3, 1, 4], 26)
    if selector == Chain():
        assert result.statistics.block_efficiency == 5


def test_a_drafter_with_fewer_positions_stops_drafting_there(device):
    target = model_of("llama", torch.float64, device, seed=0)
    drafter = DraftModel(model_of("gpt2", torch.float64, device, n_positions=20), depth=4)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    result = Decoder(target, drafter, selector=Chain()).generate(prompt, max_new_tokens=30)
    assert list(result.token_ids) == reference_text(target.model, prompt, 30)
    depths = [step.tree_depth for step in result.statistics.steps]
    assert (depths[0], depths[-1]) == (4, 0)
    # A prompt that is too long already is not read at all.
    long = list(range(25))
    result = Decoder(target, drafter, selector=OptTree(5)).generate(long, max_new_tokens=5)
    assert list(result.token_ids) == reference_text(target.model, long, 5)


def test_a_token_that_overflows_spoils_one_draft_alone(device):
    """No mask keeps its states from the nodes beside it; of these none stays in the drafter's cache."""
    target, model = (
        HuggingFaceTarget(tiny_model("llama", vocab_size=VOCAB, dtype=torch.float64, device=device))
        for _ in range(2)
    )
    prompt = [3, 1, 4]
    plain = reference_text(target.model, prompt, 40)
    unused = [token for token in range(VOCAB) if token not in {*prompt, *plain}]
    with torch.no_grad():
        model.model.get_input_embeddings().weight[unused] = torch.nan
    # The target's own weights, and so warm that unlikely tokens are looked at too.
    drafter = DraftModel(model, depth=4, children=4, temperature=50.0)
    result = Decoder(target, drafter, selector=OptTree(10)).generate(prompt, max_new_tokens=40)
    assert list(result.token_ids) == plain
    accepted = [step.num_accepted for step in result.statistics.steps]
    depths = [step.tree_depth for step in result.statistics.steps]
    assert min(depths[:-2]) <= 2, "no draft was spoiled"
    assert min(accepted[:-1]) >= 1, "the likeliest token comes next, whatever was drafted before"
