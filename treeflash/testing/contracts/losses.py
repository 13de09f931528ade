"""What training expects of a loss."""

import torch

from treeflash.testing.contracts.contract import check_options
from treeflash.trainable import Loss


class LossContract:
    """Subclass it and say how the loss is made."""

    def make(self) -> Loss:
        """Makes the loss."""
        raise NotImplementedError

    def test_it_can_be_configured(self) -> None:
        """Options are an attrs class, and it is documented."""
        check_options(self.make())

    def test_rows_are_finite_and_apart(self) -> None:
        """One number a row, the same whatever the other rows are; also where a row has no label."""
        loss, (draft, target, labels) = self.make(), _rows()
        values = loss.rows(draft, target, labels)
        assert values.shape == (len(labels),)
        assert values.dtype == torch.float32
        assert bool(torch.isfinite(values).all())
        for index in range(len(labels)):
            one = slice(index, index + 1)
            torch.testing.assert_close(loss.rows(draft[one], target[one], labels[one]), values[one])

    def test_it_can_be_learned_from(self) -> None:
        """Going down its gradient makes it less."""
        loss, (draft, target, labels) = self.make(), _rows()
        draft.requires_grad_(True)
        before = loss.rows(draft, target, labels).sum()
        (gradient,) = torch.autograd.grad(before, draft)
        assert bool(torch.isfinite(gradient).all())
        after = loss.rows(draft - 1e-2 * gradient, target, labels).sum()
        assert float(after.detach()) < float(before.detach())


def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    draft = torch.randn(6, 11, generator=random)
    target = (3 * torch.randn(6, 11, generator=random)).log_softmax(dim=-1)
    labels = torch.randint(11, (6,), generator=random)
    labels[2] = -1
    return draft, target, labels
