"""No refiner: the backbone's own distributions, whatever the token before."""

from typing import ClassVar

import attrs
from torch import Tensor

from treeflash.interfaces import Refiner
from treeflash.types import BlockDraft


@attrs.frozen
class NoRefiner(Refiner):
    """Leaves the draft as the backbone gives it."""

    history: ClassVar[int] = 0

    def children(self, draft: BlockDraft, slots: Tensor, previous: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Reads the marginals."""
        ids, log_probs = draft.top_k(k)
        return ids[:, slots], log_probs[:, slots]
