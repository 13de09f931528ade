"""Total variation distance: how often the two would disagree at best."""

import attrs
from torch import Tensor

from treeflash.trainable import Loss


@attrs.frozen
class TotalVariation(Loss):
    """Is bounded: rows that are far off pull no harder than others."""

    def rows(self, draft_logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
        """Sums `|p - q| / 2`."""
        return (target_log_probs.exp() - draft_logits.softmax(dim=-1)).abs().sum(dim=-1) / 2
