"""What the tests of the draft model share: models, and a drafter that is fed a text."""

import functools

import torch

from treeflash.components.drafters.draft_model import DraftModel
from treeflash.target import HuggingFaceTarget
from treeflash.testing.families import tiny_model

VOCAB = 40


@functools.cache
def model_of(family, dtype, device, seed=1, vocab_size=VOCAB, **changes):
    """A model of one kind; the same seed is the same model."""
    model = tiny_model(family, vocab_size=vocab_size, seed=seed, dtype=dtype, device=device, **changes)
    return HuggingFaceTarget(model)


def drafter_of(family, dtype, device, **options):
    drafter = DraftModel(model_of(family, dtype, device), **options)
    drafter.bind(model_of(family, dtype, device, seed=0))
    return drafter


def row(ids, device):
    return torch.tensor([list(ids)], dtype=torch.int64, device=device)


def extend(drafter, state, ids):
    drafter.extend(state, row(ids, drafter.model.device), None, torch.tensor([len(ids)]))


def propose(drafter, state, text, limits):
    """The draft behind a text that is known up to its last token, the anchor."""
    return drafter.propose(state, row([0, *text][-2:], drafter.model.device), limits)
