"""How far a draft's distribution is from the target's, row by row."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import attrs
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Loss(ABC):
    """Compares two distributions over the vocabulary."""

    @abstractmethod
    def rows(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Computes the loss of each row.

        Args:
            draft_logits: float32 `[R, V]`, with gradient.
            target_logits: float32 `[R, V]`, without.
            labels: int64 `[R]`: the tokens the target wrote.

        Returns:
            float32 `[R]`.
        """


@attrs.frozen
class ForwardKl(Loss):
    """KL divergence of the target's distribution from the draft's: nothing the target may say is missed."""

    def rows(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Sums `p (log p - log q)`."""
        log_p, log_q = target_logits.log_softmax(-1), draft_logits.log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


@attrs.frozen
class CrossEntropy(Loss):
    """Surprise at the token the target wrote."""

    def rows(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Takes `-log q` of the label."""
        return torch.nn.functional.cross_entropy(draft_logits, labels, reduction="none")


@attrs.frozen
class TotalVariation(Loss):
    """Half the sum of absolute differences: how often the two would disagree at best."""

    def rows(self, draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
        """Sums `|p - q| / 2`."""
        return (target_logits.softmax(-1) - draft_logits.softmax(-1)).abs().sum(dim=-1) / 2


def weighted_loss(
    loss: Loss,
    draft_normed: Tensor,
    target_normed: Tensor,
    labels: Tensor,
    weights: Tensor,
    project: Callable[[Tensor], Tensor],
    *,
    chunk: int = 256,
) -> Tensor:
    """Sums the loss over rows, a few rows of logits at a time, in the backward pass too.

    A row of logits is as wide as the vocabulary. Each chunk's are made, used and thrown away, and made again
    when its gradient is wanted: memory does not grow with the number of rows.

    Args:
        loss: The loss.
        draft_normed: `[R, D]`, behind the draft's final norm, with gradient.
        target_normed: `[R, D]`, the target's, behind its final norm.
        labels: int64 `[R]`.
        weights: float32 `[R]`; rows of weight 0 are not computed.
        project: The output head.
        chunk: Rows at a time.

    Returns:
        A float32 scalar, the weighted sum.
    """
    counted = weights.nonzero()[:, 0]

    def of_chunk(rows: Tensor, draft: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            target_logits = project(target).float()
        values = loss.rows(project(draft).float(), target_logits, labels[rows])
        return (values * weights[rows]).sum()

    total = draft_normed.new_zeros((), dtype=torch.float32)
    for start in range(0, counted.shape[0], chunk):
        rows = counted[start : start + chunk]
        part: Tensor = checkpoint(
            of_chunk, rows, draft_normed[rows], target_normed[rows], use_reentrant=False
        )
        total = total + part
    return total
