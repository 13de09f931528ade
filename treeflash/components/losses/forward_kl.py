"""KL divergence of the draft's distribution from the target's."""

import attrs
import torch
from torch import Tensor

from treeflash.trainable import Loss


@attrs.frozen
class ForwardKl(Loss):
    """Misses nothing that the target may say."""

    def rows(self, draft_logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
        """Sums `p (log p - log q)`; the draft's normaliser is taken out of the sum, since p adds up to 1."""
        p = target_log_probs.exp()
        return (p * (target_log_probs - draft_logits)).sum(dim=-1) + torch.logsumexp(draft_logits, dim=-1)
