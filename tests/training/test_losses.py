"""Losses against their definitions, and memory that does not grow with the rows."""

import pytest
import torch

from treeflash.training.losses import CrossEntropy, ForwardKl, TotalVariation, weighted_loss

LOSSES = [ForwardKl(), CrossEntropy(), TotalVariation()]


def case(rows=23, width=6, vocabulary=31, seed=0):
    random = torch.Generator().manual_seed(seed)
    head = torch.randn(vocabulary, width, generator=random)
    draft = torch.randn(rows, width, generator=random, requires_grad=True)
    target = torch.randn(rows, width, generator=random)
    labels = torch.randint(vocabulary, (rows,), generator=random)
    weights = torch.rand(rows, generator=random)
    weights[::4] = 0
    return head, draft, target, labels, weights


def literal(loss, head, draft, target, labels):
    q, p = (draft @ head.T).softmax(-1), (target @ head.T).softmax(-1)
    if isinstance(loss, ForwardKl):
        return (p * (p / q).log()).sum(-1)
    if isinstance(loss, CrossEntropy):
        return -q[torch.arange(len(labels)), labels].log()
    return 0.5 * (p - q).abs().sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: type(loss).__name__)
def test_values_and_gradients(loss, chunk):
    head, draft, target, labels, weights = case()
    found = weighted_loss(loss, draft, target, labels, weights, lambda rows: rows @ head.T, chunk=chunk)
    (gradient,) = torch.autograd.grad(found, draft)
    expected = (literal(loss, head, draft, target, labels) * weights).sum()
    (expected_gradient,) = torch.autograd.grad(expected, draft)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert (gradient[::4] == 0).all()


@pytest.mark.parametrize("loss", LOSSES[::2], ids=lambda loss: type(loss).__name__)
def test_a_perfect_draft_has_no_loss(loss):
    head, _, target, labels, weights = case()
    found = weighted_loss(loss, target.clone(), target, labels, weights, lambda rows: rows @ head.T)
    assert float(found) == pytest.approx(0, abs=1e-5)


def test_only_a_chunk_of_logits_is_kept():
    """What the graph holds on to between the passes is hidden states, and no row of logits."""
    vocabulary = 5000
    head, draft, target, labels, weights = case(rows=64, vocabulary=vocabulary)
    saved = []

    def pack(tensor):
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        weighted_loss(ForwardKl(), draft, target, labels, weights, lambda rows: rows @ head.T, chunk=8)
    assert all(vocabulary not in shape for shape in saved)


def test_no_rows_is_no_loss():
    head, draft, target, labels, weights = case()
    found = weighted_loss(ForwardKl(), draft, target, labels, weights * 0, lambda rows: rows @ head.T)
    assert float(found) == 0
