"""The tokens that a drafter scores: those its checkpoint lists, and no other."""

import json

import pytest
import torch

from treeflash.checkpoints.shortlist import FILE, write_shortlist
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.bilinear import Bilinear, BilinearNetwork
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import CheckpointError
from treeflash.types import DraftHead, Limits

# The toy target's letters.
LISTED = torch.tensor([2, 32, 46, *range(97, 123)])


@pytest.fixture
def folder(checkpoint_files, tmp_path):
    checkpoint_files.shipped().write(tmp_path)
    write_shortlist(tmp_path, LISTED)
    return tmp_path


def draft_of(drafter, target):
    Decoder(target, drafter, Marginal(), NoRefiner())
    state = drafter.start(1, 20)
    prompt = torch.tensor([[2, *b"Ana has 7 "]])
    with torch.inference_mode():
        taps = target.prefill(target.start(1, 20, drafter.tap_layers), prompt).taps
        drafter.extend(state, prompt, taps, torch.tensor([prompt.shape[1]]))
        return drafter.propose(state, torch.tensor([[32, 97]]), Limits(8, 7))


def test_a_draft_is_that_of_all_tokens_among_the_listed(folder, tiny_target):
    listed, whole = (
        draft_of(DFlash.from_checkpoint(folder, tiny_target, shortlist=wanted), tiny_target)
        for wanted in (True, False)
    )
    with torch.inference_mode():
        expected = whole.head.logits(whole.normed)[..., LISTED].log_softmax(-1)
        ids, log_probs = listed.top_k(6)
        torch.testing.assert_close(log_probs, expected.topk(6).values)
        assert torch.equal(ids, LISTED[expected.topk(6).indices])
        # Behind a refiner's states the same.
        ids, log_probs = listed.head.top_k(listed.normed, 6)
        assert torch.equal(ids, LISTED[expected.topk(6).indices])
        torch.testing.assert_close(log_probs, expected.topk(6).values)
        assert listed.top_k(1000)[0].shape[-1] == listed.head.width == len(LISTED)
        outside = listed.log_mass_outside(ids)
        torch.testing.assert_close(outside.exp(), 1 - log_probs.exp().sum(-1, keepdim=True))


def test_a_refiner_of_pairs_takes_tokens_and_not_columns(folder, tiny_target):
    draft = draft_of(DFlash.from_checkpoint(folder, tiny_target), tiny_target)
    torch.manual_seed(0)
    network = BilinearNetwork(tiny_target.hidden_size, tiny_target.vocab_size, 4)
    network.requires_grad_(False)
    with torch.inference_mode():
        slots, previous = torch.tensor([0, 1]), torch.tensor([[[97], [110]]])
        ids, log_probs = Bilinear(network, candidates=5).children(draft, slots, previous, 5)
        for context in range(2):
            marginal = draft.head.logits(draft.normed)[0, slots[context]].log_softmax(-1)
            query = (
                network.predecessor(previous[0, context, 0])
                * network.projection(draft.normed)[0, slots[context]]
            )
            best = marginal.topk(5).indices
            scores = marginal.clone()
            scores[best] += network.successor(LISTED[best]) @ query
            expected = scores.log_softmax(-1)
            among = {int(LISTED[index]): float(expected[index]) for index in best}
            assert set(ids[0, context].tolist()) == set(among)
            for token, found in zip(ids[0, context].tolist(), log_probs[0, context].tolist(), strict=True):
                assert found == pytest.approx(among[token], abs=1e-5)


def test_the_text_is_the_targets_own(folder, tiny_target):
    prompt = [2, *b"Ana has 7 apples."]
    drafter, refiner = (
        DFlash.from_checkpoint(folder, tiny_target),
        SwiGlu.from_checkpoint(folder, tiny_target),
    )
    trees = []
    decoder = Decoder(tiny_target, drafter, TopM(4, 4), refiner, OptTree(15))
    found = decoder.generate(
        prompt, max_new_tokens=60, on_emission=lambda emission: trees.append(emission.tree)
    )
    assert found.token_ids == Decoder(tiny_target).generate(prompt, max_new_tokens=60).token_ids
    drafted = {token for tree in trees if tree is not None for token in tree.token_ids[0, 1:].tolist()}
    assert len(drafted) > 5
    assert drafted <= set(LISTED.tolist())
    assert found.statistics.block_efficiency > 2


FAULTS = {
    "no list": {"token_ids": 5},
    "none": {"token_ids": []},
    "not ascending": {"token_ids": [3, 2]},
    "twice": {"token_ids": [3, 3]},
    "no integers": {"token_ids": [3, 4.5]},
    "beyond the vocabulary": {"token_ids": [3, 128]},
    "negative": {"token_ids": [-1, 3]},
    "another key": {"ids": [1, 2]},
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_list_that_cannot_be_used_is_refused(folder, tiny_target, case):
    (folder / FILE).write_text(json.dumps(FAULTS[case]))
    with pytest.raises(CheckpointError) as error:
        DFlash.from_checkpoint(folder, tiny_target)
    assert f"{FILE}: expected token_ids, ascending token ids below 128; found others" in str(error.value)
    assert DFlash.from_checkpoint(folder, tiny_target, shortlist=False).columns is None


def test_a_file_that_is_no_json(folder, tiny_target):
    (folder / FILE).write_text("[")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        DFlash.from_checkpoint(folder, tiny_target)


def test_without_a_list_all_tokens_are_scored(checkpoint_files, tmp_path, tiny_target):
    checkpoint_files.shipped().write(tmp_path)
    drafter = DFlash.from_checkpoint(tmp_path, tiny_target)
    assert drafter.columns is None
    head = draft_of(drafter, tiny_target).head
    assert (head.width, head.columns) == (128, None)


def test_a_column_is_a_token_and_back():
    head = DraftHead(lambda ids: ids, lambda hidden: hidden, lambda normed: normed, 128, columns=LISTED)
    columns = torch.tensor([[0, 3], [28, 1]])
    assert torch.equal(head.tokens(columns), LISTED[columns])
    assert torch.equal(head.index(LISTED[columns]), columns)
