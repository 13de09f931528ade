"""Losses against their definitions, and memory that does not grow with the rows."""

import pytest
import torch

from treeflash.components.losses.cross_entropy import CrossEntropy
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.components.losses.total_variation import TotalVariation
from treeflash.components.trainables.chunked import chunked_sum

LOSSES = [ForwardKl(), CrossEntropy(), TotalVariation()]


def case(rows=23, width=6, vocabulary=31, seed=0):
    random = torch.Generator().manual_seed(seed)
    head = torch.randn(vocabulary, width, generator=random, requires_grad=True)
    draft = torch.randn(rows, width, generator=random, requires_grad=True)
    target = torch.randn(rows, width, generator=random)
    labels = torch.randint(vocabulary, (rows,), generator=random)
    weights = torch.rand(rows, generator=random)
    return head, draft, target, labels, weights


def literal(loss, draft_logits, target_logits, labels):
    q, p = draft_logits.softmax(-1), target_logits.softmax(-1)
    if isinstance(loss, ForwardKl):
        return (p * (p / q).log()).sum(-1)
    if isinstance(loss, CrossEntropy):
        picked = -q[torch.arange(len(labels)), labels.clamp(min=0)].log()
        return torch.where(labels < 0, 0.0, picked)
    return 0.5 * (p - q).abs().sum(-1)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_rows_and_their_gradients(loss):
    head, draft, target, labels, _ = case()
    labels[::5] = -1
    logits, wanted = draft @ head.detach().T, target @ head.detach().T
    found, expected = loss.rows(logits, wanted.log_softmax(-1), labels), literal(loss, logits, wanted, labels)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(value.sum(), draft, retain_graph=True)[0] for value in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("loss", LOSSES[::2], ids=lambda loss: type(loss).__name__)
def test_a_perfect_draft_has_no_loss(loss):
    head, _, target, labels, _ = case()
    logits = target @ head.detach().T
    assert float(loss.rows(logits, logits.log_softmax(-1), labels).abs().max()) == pytest.approx(0, abs=1e-5)


def weighted(loss, target):
    def function(rows, labels, weights, wanted, head=target):
        log_probs = (wanted @ target.T).log_softmax(-1)
        return (loss.rows(rows @ head.T, log_probs, labels) * weights).sum()

    return function


@pytest.mark.parametrize("step", [1, 5, 23, 1000])
def test_sums_in_chunks_are_the_sum(step):
    """Values, and gradients both of rows and of what all rows share."""
    head, draft, target, labels, weights = case()
    function = weighted(ForwardKl(), head.detach())
    rows = (draft, labels, weights, target)
    found, expected = chunked_sum(function, rows, (head,), step=step), function(*rows, head)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(3 * found, (draft, head)),
        torch.autograd.grad(3 * expected, (draft, head)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_only_a_chunk_of_logits_is_kept():
    """What the graph holds on to between the passes is hidden states, and no row of logits."""
    vocabulary = 5000
    head, draft, target, labels, weights = case(rows=64, vocabulary=vocabulary)
    found = chunked_sum(weighted(ForwardKl(), head.detach()), (draft, labels, weights, target), step=8)
    kept = found.grad_fn.saved_tensors
    assert [tuple(tensor.shape) for tensor in kept] == [tuple(draft.shape)]


def test_no_rows_is_no_loss():
    head, draft, target, labels, weights = (part[:0] for part in case())
    rows = (draft, labels, weights, target)
    found = chunked_sum(weighted(ForwardKl(), torch.ones(4, 6)), rows, (head[:4],), step=8)
    assert float(found.detach()) == 0


def test_without_gradients_it_only_adds_up():
    head, draft, target, labels, weights = case()
    with torch.no_grad():
        found = chunked_sum(weighted(ForwardKl(), head), (draft, labels, weights, target), (head,), step=8)
    assert not found.requires_grad
