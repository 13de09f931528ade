"""Surprise at the token the target wrote."""

import attrs
from torch import Tensor
from torch.nn import functional

from treeflash.trainable import Loss


@attrs.frozen
class CrossEntropy(Loss):
    """Looks at one sample of the target's distribution: the text."""

    def rows(self, draft_logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
        """Takes `-log q` of the label; 0 where it has no column."""
        return functional.cross_entropy(draft_logits, labels, reduction="none", ignore_index=-1)
