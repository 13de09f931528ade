"""What refiners with weights share: where the weights come from, and what they correct."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import torch
from torch import Tensor, nn

from treeflash.checkpoints.dflash_layout import open_for
from treeflash.checkpoints.reader import Checkpoint, weight_misfits
from treeflash.errors import CheckpointError, bullet_list
from treeflash.interfaces import BuildContext, Refiner
from treeflash.target_interface import Target
from treeflash.types import BlockDraft


@attrs.frozen
class RefinerOptions:
    """What a recipe says of a refiner with weights.

    Attributes:
        checkpoint: Folder or hub name of the checkpoint; the drafter's when not given.
    """

    checkpoint: str | None = None


@attrs.define(eq=False)
class TrainedRefiner(Refiner):
    """A refiner with weights.

    Attributes:
        network: The weights, named as in the checkpoint behind `ar_approximation.`.
        layout: The name a checkpoint's config gives this kind of refiner.
    """

    Options: ClassVar[type | None] = RefinerOptions
    layout: ClassVar[str]

    network: Any

    @classmethod
    @abstractmethod
    def make_network(cls, checkpoint: Checkpoint, target: Target) -> nn.Module:
        """Sizes the network.

        Args:
            checkpoint: The checkpoint, its config checked.
            target: The target.

        Returns:
            The module, its values to be filled in.
        """

    @classmethod
    def from_options(cls, options: Any, context: BuildContext) -> Self:
        """Reads the checkpoint that a recipe names, or the drafter's."""
        name = options.checkpoint or context.drafter_checkpoint
        if name is None:
            raise CheckpointError(
                f"refiner {cls.layout!r} needs weights; expected a key checkpoint in [refiner] or [drafter]"
            )
        return cls.from_checkpoint(context.locate(name), context.target)

    @classmethod
    def from_checkpoint(cls, folder: Path | str, target: Target) -> Self:
        """Reads a checkpoint's refiner for a target.

        Args:
            folder: With `config.json` and safetensors, in the TreeFlash layout.
            target: The target whose drafts it will refine.

        Returns:
            The refiner, in the target's dtype on its device.

        Raises:
            CheckpointError: Listing everything that does not fit.
        """
        checkpoint, facts, faults = open_for(folder, target)
        if facts.refiner != cls.layout:
            found = "no refiner" if facts.refiner is None else repr(facts.refiner)
            faults.append(f"treeflash_config.ar_approximation: expected {cls.layout!r}, found {found}")
        else:
            with torch.device("meta"):
                network = cls.make_network(checkpoint, target)
            faults += checkpoint.load(network, "refiner")
        if faults:
            raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults))
        return cls(network.to(device=target.device, dtype=target.dtype).eval())

    def bind(self, target: Target) -> None:
        """Makes sure that the weights go with the target's."""
        faults = weight_misfits(self.network, target)
        if faults:
            raise CheckpointError(bullet_list("the refiner was made for another target", faults))


@attrs.define(eq=False)
class HiddenRefiner(TrainedRefiner):
    """A refiner that corrects the hidden state and leaves the rest to the drafter's norm and head."""

    def children(self, draft: BlockDraft, slots: Tensor, previous: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Reads the corrected hidden states."""
        embedded = draft.head.embed(previous)
        corrected = draft.hidden[:, slots] + self.correction(embedded, draft.normed, slots)
        return draft.head.top_k(draft.head.norm(corrected), k)

    @abstractmethod
    def correction(self, embedded: Tensor, normed: Tensor, slots: Tensor) -> Tensor:
        """What to add to the hidden states.

        Args:
            embedded: Embeddings of the tokens before, `[B, F, history, D]`.
            normed: The draft's hidden states behind the final norm, `[B, P, D]`.
            slots: int64 `[F]`: which of them each context is about.

        Returns:
            `[B, F, D]`.
        """


def per_source(weight: Tensor, embedded: Tensor, normed: Tensor, slots: Tensor) -> Tensor:
    """A product with the concatenation of embeddings and a hidden state, without concatenating.

    The half of the hidden states is computed once per position, however many contexts share it.

    Args:
        weight: `[out, (history + 1) * D]`, the embeddings' columns first.
        embedded: `[B, F, history, D]`.
        normed: `[B, P, D]`.
        slots: int64 `[F]`.

    Returns:
        `[B, F, out]`.
    """
    width = embedded.shape[-2] * embedded.shape[-1]
    of_tokens = embedded.flatten(-2) @ weight[:, :width].T
    of_hidden = normed @ weight[:, width:].T
    return of_tokens + of_hidden[:, slots]
