"""What a block drafter and its refiner learn from one row of text.

Source: DFlash (blocks, position weights) and TreeFlash (the refined distribution beside the backbone's own).
"""

import attrs
import torch
from torch import Tensor

from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.components.refiners.trained import HiddenRefiner
from treeflash.target_interface import Target
from treeflash.training.blocks import Blocks, PackedText, position_weights
from treeflash.training.losses import Loss, weighted_loss


@attrs.frozen(eq=False)
class ReadText:
    """A packed row and what the target made of it.

    Attributes:
        text: The row.
        taps: `[S, L * D]`, the tapped layers' outputs.
        normed: `[S, D]`, the states behind the target's final norm: position i's gives the distribution of
            the token at i + 1.
    """

    text: PackedText
    taps: Tensor
    normed: Tensor


@attrs.frozen
class Objective:
    """The loss of a row: that of the refined distribution, and the backbone's own beside it.

    Attributes:
        loss: Compares distributions.
        decay: Of the position weights; None counts all slots alike.
        backbone_weight: Lambda: what the backbone's own loss counts beside the refined one. Without a
            refiner it is the whole.
    """

    loss: Loss
    decay: float | None = 4.0
    backbone_weight: float = 1.0

    def __call__(
        self,
        network: DFlashNetwork,
        refiner: HiddenRefiner | None,
        target: Target,
        read: ReadText,
        blocks: Blocks,
        mask_token_id: int,
    ) -> Tensor:
        """Drafts the blocks as inference would and compares with the target.

        Args:
            network: The backbone.
            refiner: The refiner, by teacher forcing; None without one.
            target: Gives embedding and head.
            read: The row.
            blocks: Where to draft in it.
            mask_token_id: Fills the drafted slots.

        Returns:
            A float32 scalar: the mean over labelled slots, by weight.
        """
        text, size = read.text, blocks.block_size
        rows = blocks.rows(text)
        masks = torch.full_like(rows[:, 1:], mask_token_id)
        slots = torch.cat([text.token_ids[blocks.anchors][:, None], masks], dim=1)
        hidden, normed = network.forward_blocks(
            target.embed(slots).flatten(0, 1)[None],
            read.taps[None],
            blocks.positions(text).flatten()[None],
            text.positions[None],
            blocks.visibility(text),
        )
        # Slot k predicts the token at slot k; the target says what it should be one position before.
        hidden, normed = (states[0].view(-1, size, states.shape[-1])[:, 1:] for states in (hidden, normed))
        labels, previous = text.token_ids[rows[:, 1:]], text.token_ids[rows[:, :-1]]
        wanted = read.normed[rows[:, :-1]]
        weights = position_weights(size - 1, self.decay).to(labels.device) * blocks.has_label(text)

        def of(drafted: Tensor) -> Tensor:
            total = weighted_loss(
                self.loss,
                drafted.flatten(0, 1),
                wanted.flatten(0, 1),
                labels.flatten(),
                weights.flatten(),
                target.project,
            )
            return total / weights.sum().clamp(min=1e-6)

        if refiner is None:
            return of(normed)
        places = torch.arange(size - 1, device=labels.device)
        embedded = target.embed(_histories(text, rows, previous, refiner.history))
        corrected = hidden + refiner.correction(embedded, normed, places)
        value = of(network.norm(corrected))
        return value + self.backbone_weight * of(normed) if self.backbone_weight else value


def _histories(text: PackedText, rows: Tensor, previous: Tensor, history: int) -> Tensor:
    """The true tokens before each drafted slot, int64 `[A, P, history]`, the older first."""
    if history == 1:
        return previous[..., None]
    # A block's anchor has a token before it: a text begins with its prompt.
    older = text.token_ids[(rows[:, :-1] - 1).clamp(min=0)]
    return torch.stack([older, previous], dim=-1)
