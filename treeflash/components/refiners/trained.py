"""What refiners with weights share: where the weights come from, and what they correct."""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import attrs
import torch
from attrs.validators import ge, optional
from torch import Tensor, nn

from treeflash.checkpoints.dflash_layout import open_for
from treeflash.checkpoints.reader import SHOWN_FAULTS, Checkpoint, weight_misfits
from treeflash.errors import CheckpointError, bullet_list
from treeflash.interfaces import BuildContext, Refiner
from treeflash.layouts import Linear, is_just_a_map
from treeflash.target_interface import Target
from treeflash.types import BlockDraft


@attrs.frozen
class RefinerOptions:
    """What a recipe says of a refiner with weights.

    Attributes:
        checkpoint: Folder or hub name of the checkpoint; the drafter's when not given.
    """

    checkpoint: str | None = None


@attrs.frozen
class HiddenRefinerOptions(RefinerOptions):
    """What a recipe says of a refiner of hidden states.

    Attributes:
        candidates: Of each position's likeliest tokens, how many are scored anew; the others keep their
            probability. All are when not given.
    """

    candidates: int | None = attrs.field(default=None, validator=optional(ge(1)))


@attrs.frozen
class RefinerTrainingOptions:
    """What a training recipe says of a refiner.

    Attributes:
        checkpoint: Folder or hub name of a checkpoint to start from; from zero when not given, so that the
            drafter decodes as its backbone alone.
    """

    checkpoint: str | None = None


@attrs.frozen(eq=False)
class Contexts:
    """Places in drafts, and the tokens that lead to each, R in all.

    Attributes:
        hidden: The backbone's states before its final norm, `[R, D]`.
        normed: Behind it, `[R, D]`.
        previous: int64 `[R, history]`: the tokens before.
        embed: int64 `[...]` to `[..., D]`.
        norm: The backbone's final norm.
        columns: int64 `[V']`: the tokens that are scored; None for all.
    """

    hidden: Tensor
    normed: Tensor
    previous: Tensor
    embed: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    columns: Tensor | None


@attrs.frozen(eq=False)
class Lesson:
    """Contexts whose distributions are compared with the target's, a few rows of logits at a time.

    Attributes:
        rows: `[R, ...]` each: what a row's logits are made of.
        tables: What all rows' logits are made of, beside the output head.
        logits: From the head, as many rows of each of `rows`, and all of `tables`, to logits `[r, V']`.
    """

    rows: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    logits: Callable[..., Tensor]


@attrs.define(eq=False)
class TrainedRefiner(Refiner):
    """A refiner with weights.

    Attributes:
        network: The weights, named as in the checkpoint behind `ar_approximation.`.
        layout: The name a checkpoint's config gives this kind of refiner.
        TrainingOptions: The frozen attrs class of the keys a training recipe may give.
    """

    Options: ClassVar[type | None] = RefinerOptions
    TrainingOptions: ClassVar[type] = RefinerTrainingOptions
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
    @abstractmethod
    def fresh_network(cls, options: Any, target: Target, intermediate_size: int) -> nn.Module:
        """Sizes a network that is to be trained.

        Args:
            options: An instance of `TrainingOptions`.
            target: The target.
            intermediate_size: Width of the drafter's SwiGLU layers.

        Returns:
            The module, with a method `reset(generator)` that gives its weights their first values.
        """

    @abstractmethod
    def lesson(self, contexts: Contexts) -> Lesson:
        """Prepares contexts for training.

        Args:
            contexts: The contexts.

        Returns:
            Their rows, with gradients.
        """

    @classmethod
    def fresh(cls, options: Any, target: Target, intermediate_size: int, generator: torch.Generator) -> Self:
        """Makes a refiner that changes nothing yet.

        Args:
            options: An instance of `TrainingOptions`.
            target: The target.
            intermediate_size: Width of the drafter's SwiGLU layers.
            generator: Of its first weights, on the CPU.

        Returns:
            The refiner, in float32 on the target's device.
        """
        with torch.device("meta"):
            network: Any = cls.fresh_network(options, target, intermediate_size)
        network.to_empty(device=target.device).float().reset(generator)
        return cls(network)

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
            raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults, most=SHOWN_FAULTS))
        return cls(network.to(device=target.device, dtype=target.dtype).eval())

    def bind(self, target: Target) -> None:
        """Makes sure that the weights go with the target's."""
        faults = weight_misfits(self.network, target)
        if faults:
            raise CheckpointError(bullet_list("the refiner was made for another target", faults))


@attrs.define(eq=False)
class HiddenRefiner(TrainedRefiner):
    """A refiner that corrects the hidden state and leaves the rest to the drafter's norm and head.

    Attributes:
        candidates: As in the options.
    """

    Options: ClassVar[type | None] = HiddenRefinerOptions

    candidates: int | None = None

    @classmethod
    def from_options(cls, options: Any, context: BuildContext) -> Self:
        """Reads the checkpoint, then sets the number of candidates."""
        refiner = super().from_options(options, context)
        refiner.candidates = options.candidates
        return refiner

    def children(self, draft: BlockDraft, slots: Tensor, previous: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Reads the corrected hidden states."""
        head = draft.head
        embedded = head.embed(previous)
        normed = head.norm(draft.hidden[:, slots] + self.correction(embedded, draft.normed, slots))
        wanted = None if self.candidates is None else max(self.candidates, k)
        if wanted is None or wanted >= head.width or head.rows is None:
            return head.top_k(normed, k)
        ids, _ = draft.top_k(wanted)
        scores = _scores(normed, slots, *head.rows(ids)).float() / head.temperature
        # What the others have of the backbone's own probability they keep.
        inside = torch.log1p(-draft.log_mass_outside(ids).exp().clamp(max=1 - 1e-6))[:, slots]
        best, order = (scores.log_softmax(dim=-1) + inside).topk(min(k, wanted), dim=-1)
        return ids[:, slots].gather(2, order), best

    def lesson(self, contexts: Contexts) -> Lesson:
        """Corrects the hidden states; the head does the rest."""
        embedded, normed = contexts.embed(contexts.previous), contexts.normed
        change = self.correction(embedded[None], normed[None], slice(None))[0]
        corrected = contexts.norm(contexts.hidden + change)
        return Lesson((corrected,), (), lambda head, rows: head(rows))

    @abstractmethod
    def correction(self, embedded: Tensor, normed: Tensor, slots: Tensor | slice) -> Tensor:
        """What to add to the hidden states.

        Args:
            embedded: Embeddings of the tokens before, `[B, F, history, D]`.
            normed: The draft's hidden states behind the final norm, `[B, P, D]`.
            slots: int64 `[F]`, or a slice of F: which of them each context is about.

        Returns:
            `[B, F, D]`.
        """


def _scores(normed: Tensor, slots: Tensor, rows: Tensor, biases: Tensor | None) -> Tensor:
    """Logits of each position's own candidates.

    Args:
        normed: `[B, F, D]`.
        slots: int64 `[F]`: the position of each.
        rows: The head's weights for the candidates, `[B, P, C, D]`.
        biases: `[B, P, C]`, or None.

    Returns:
        `[B, F, C]`.
    """
    if _goes_by_position(normed):
        places, counts = torch.unique_consecutive(slots, return_counts=True)
        groups = zip(places.tolist(), torch.split(normed, counts.tolist(), dim=1), strict=True)
        scores = torch.cat([group @ rows[:, place].mT for place, group in groups], dim=1)
    else:
        # One product with the candidates of all positions, then each one's own.
        every = normed @ rows.flatten(1, 2).mT
        own = slots[:, None] * rows.shape[2] + torch.arange(rows.shape[2], device=slots.device)
        scores = every.gather(2, own.expand(len(every), -1, -1))
    return scores if biases is None else scores + biases[:, slots]


def _goes_by_position(states: Tensor) -> bool:
    """Whether products go position by position: on a GPU, which context is where would have to be asked."""
    return states.device.type == "cpu"


def per_source(linear: Linear, embedded: Tensor, normed: Tensor, slots: Tensor | slice) -> Tensor:
    """A map of the concatenation of embeddings and a hidden state, without concatenating.

    The half of the hidden states is computed once per position, however many contexts share it. A map that
    was adapted or hooked is called as it is.

    Args:
        linear: From `(history + 1) * D` inputs, the embeddings' first.
        embedded: `[B, F, history, D]`.
        normed: `[B, P, D]`.
        slots: int64 `[F]`, or a slice of F.

    Returns:
        `[B, F, out]`.
    """
    tokens = embedded.flatten(-2)
    if not is_just_a_map(linear):
        out: Tensor = linear(torch.cat([tokens, normed[:, slots]], dim=-1))
        return out
    width = tokens.shape[-1]
    of_tokens, of_hidden = linear.over(slice(0, width), tokens), linear.over(slice(width, None), normed)
    both = of_tokens + of_hidden[:, slots]
    return both if linear.bias is None else both + linear.bias


def reset_weights(network: nn.Module, generator: torch.Generator, *, zero: str) -> None:
    """Gives a refiner's weights their first values.

    Args:
        network: The weights.
        generator: Of the draws, on the CPU.
        zero: The tensor that starts at zero, so that nothing is changed at first.
    """
    for name, weight in network.named_parameters():
        with torch.no_grad():
            if name == zero or weight.ndim == 1:
                weight.fill_(1.0 if name == "norm.weight" else 0.0)
            else:
                weight.copy_(torch.empty(weight.shape).normal_(std=0.02, generator=generator))
