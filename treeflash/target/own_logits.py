"""Whether a model's logits can be made again from its hidden states."""

import torch

from treeflash.errors import UnsupportedTargetError
from treeflash.target.hugging_face import HuggingFaceTarget

_TOKENS = 8
# Roundings of the largest logit that two ways to one number may be apart, and what sums may be off.
_ROUNDINGS, _SUMS = 8, 1e-3


def require_own_logits(target: HuggingFaceTarget, token_ids: torch.Tensor) -> None:
    """Makes sure that head and `finish` over the final normed states give the model's own logits.

    Training and evaluation keep states and make distributions of them; decoding takes the model's own logits.

    Args:
        target: The target.
        token_ids: int64 `[n]` on its device: any text; its first tokens are read.

    Raises:
        UnsupportedTargetError: When the family does something between head and logits that is not known.
    """
    ids = token_ids[:_TOKENS]
    where = torch.arange(len(ids), device=ids.device)
    states, theirs = target.read_with_logits(ids, where, where[:, None] >= where, (target.num_layers - 1,))
    theirs = theirs.float()
    mine = target.finish(target.head(None, target.dtype)(states[-1:]).float())
    largest = theirs[theirs.isfinite()].abs().max() if bool(theirs.isfinite().any()) else theirs.new_zeros(())
    allowed = _SUMS + _ROUNDINGS * torch.finfo(target.dtype).eps * float(largest)
    # What is added to all of them alike does not change a distribution.
    mine, theirs = mine.log_softmax(dim=-1), theirs.log_softmax(dim=-1)
    if not torch.allclose(mine, theirs, atol=allowed, rtol=0.0):
        raise UnsupportedTargetError(
            f"{type(target.model).__name__} cannot be learned from or compared with: its logits are not "
            "what its output head gives for the final normed states; expected a family that leaves that as "
            "it is, or changes it by logit_scale, logits_scaling (a divisor) or final_logit_softcapping"
        )
