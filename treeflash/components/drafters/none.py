"""No drafter: plain decoding through the same loop."""

from typing import Any

import attrs
from torch import Tensor

from treeflash.interfaces import Drafter
from treeflash.proposal import Proposal
from treeflash.types import BlockDraft, Limits


@attrs.frozen
class NoDrafter(Drafter):
    """Drafts nothing, so that every tree is the root alone."""

    drafts_blocks = False
    max_depth = 0

    def start(self, batch_size: int, capacity: int) -> None:
        """There is nothing to remember."""

    def extend(self, state: Any, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """There is nothing to learn."""

    def rewind(self, state: Any, lengths: Tensor) -> None:
        """There is nothing to forget."""

    def propose(self, state: Any, recent: Tensor, limits: Limits) -> BlockDraft | Proposal:
        """Is never asked: a depth of 0 leaves nothing to draft."""
        raise AssertionError("a drafter of depth 0 was asked for a draft")
