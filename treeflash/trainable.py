"""How drafters are trained: what a trainable and a loss are.

A drafter is trained by the class registered under the drafter's name, together with the refiner behind it.
The trainer knows this interface alone: it packs texts, lets the target read them, and sums losses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import attrs
import torch
from torch import Tensor, nn

from treeflash.interfaces import Component
from treeflash.packed_text import PackedText, ReadText
from treeflash.target_interface import Target


class TrainingTarget(Target, Protocol):
    """What training asks of a target beyond decoding.

    Attributes:
        config: Of the model; the sizes in it are what a new drafter takes after.
        layers: Its decoder layers.
    """

    config: Any
    layers: Iterable[nn.Module]

    def read(
        self, token_ids: Tensor, positions: Tensor, visible: Tensor, tap_layers: Sequence[int]
    ) -> Tensor:
        """Reads tokens in one pass, under any mask and without a cache.

        Args:
            token_ids: int64 `[n]`.
            positions: int64 `[n]`.
            visible: bool `[n, n]`: which tokens each may see.
            tap_layers: Layers whose outputs are wanted, as in `start`.

        Returns:
            `[n, F]`, side by side.
        """
        ...

    def finish(self, logits: Tensor) -> Tensor:
        """What the model does to the head's logits before it reads them as a distribution."""
        ...


class Loss(Component, ABC):
    """How far a draft's distribution is from the target's, row by row."""

    @abstractmethod
    def rows(self, draft_logits: Tensor, target_log_probs: Tensor, labels: Tensor) -> Tensor:
        """Computes the loss of each row.

        Args:
            draft_logits: float32 `[R, V']`, with gradient.
            target_log_probs: float32 `[R, V']`, without.
            labels: int64 `[R]`: the column of the token that the target wrote; -1 where it has none.

        Returns:
            float32 `[R]`.
        """


@attrs.frozen
class TrainContext:
    """What a trainable may need while it is built from a recipe.

    Attributes:
        target: The target it will draft for.
        locate: Turns a name, package path or relative path of the recipe into a folder on disk.
        loss: Compares distributions.
        columns: int64 `[V']` on the CPU, ascending: the tokens the loss looks at; None for all.
        frequent: Gives as many tokens as asked for, int64 on the CPU, ascending: the most frequent in the
            answers to learn from.
        refiner: The refiner's class, None when the recipe names none.
        refiner_options: An instance of what the class is trained with.
        dtype: In which arithmetic is done; weights are float32 throughout.
        generator: Of the first weights, on the CPU.
    """

    target: TrainingTarget
    locate: Callable[[str], Path]
    loss: Loss
    columns: Tensor | None
    frequent: Callable[[int], Tensor]
    refiner: type[Any] | None
    refiner_options: Any
    dtype: torch.dtype
    generator: torch.Generator


@attrs.frozen(eq=False)
class Task:
    """What is asked of a drafter along a packed row.

    Attributes:
        questions: The trainable's own account of it.
        weight: Sum of the weights of all answers.
        positions: Answers asked for.
    """

    questions: Any
    weight: float
    positions: int


@attrs.frozen(eq=False)
class Simulation:
    """How well a distribution foresees held-out text, in sums, so that parts can be added.

    Attributes:
        rows: float64 `[P]`: distributions looked at, by depth.
        hits: float64 `[P]`: how many had their likeliest token written by the target.
        divergence: float64 `[P]`: total variation distances, summed.
        blocks: Blocks looked at, those that the end of a text cuts short among them.
        emitted: Tokens that steps over these blocks would emit, drafting the likeliest token as a chain: none
            past the end of a text.
    """

    rows: Tensor
    hits: Tensor
    divergence: Tensor
    blocks: float
    emitted: float

    def __add__(self, other: "Simulation") -> "Simulation":
        pairs = zip(attrs.astuple(self, recurse=False), attrs.astuple(other, recurse=False), strict=True)
        return Simulation(*(mine + theirs for mine, theirs in pairs))

    def summary(self) -> dict[str, Any]:
        """Means: `top1` and `tvd` by depth, and the `block_efficiency` of a chain."""
        count = self.rows.clamp(min=1)
        return {
            "block_efficiency": round(self.emitted / max(self.blocks, 1), 4),
            "top1": [round(value, 4) for value in (self.hits / count).tolist()],
            "tvd": [round(value, 4) for value in (self.divergence / count).tolist()],
        }


class Trainable(nn.Module, ABC):
    """A drafter, and the refiner behind it, as they are trained.

    Its parameters are what is trained and, with its persistent buffers, saved; the target must not be among
    them.

    Attributes:
        Options: What a training recipe's `[drafter]` may hold.
        trains_refiners: Whether a `[refiner]` may stand in the recipe.
        tap_layers: Target layers whose outputs it reads; none unless it says so.
        target: The target it is trained for.
    """

    Options: ClassVar[type]
    trains_refiners: ClassVar[bool] = False
    tap_layers: tuple[int, ...] = ()
    target: TrainingTarget

    @classmethod
    @abstractmethod
    def from_options(cls, options: Any, context: TrainContext) -> Self:
        """Builds it, its weights float32 on the target's device.

        Args:
            options: An instance of `Options`.
            context: What else there is.

        Returns:
            The trainable.

        Raises:
            TreeflashError: When the parts do not fit, or nothing is left to train.
        """

    @abstractmethod
    def ask(self, text: PackedText, generators: Sequence[torch.Generator]) -> Task:
        """Draws what to ask along a row.

        Args:
            text: The row.
            generators: One for each of its texts, so that a text is asked the same however it is packed.

        Returns:
            The task.
        """

    @abstractmethod
    def forward(self, task: Task, read: ReadText) -> Tensor:
        """Answers, and compares with the target.

        Args:
            task: From `ask`.
            read: The same row, as the target read it.

        Returns:
            A float32 scalar: the losses times their weights, summed.
        """

    @abstractmethod
    def simulate(self, task: Task, read: ReadText) -> Mapping[str, Simulation]:
        """Measures, over the whole vocabulary.

        Args:
            task: From `ask`.
            read: The same row.

        Returns:
            A measurement for each distribution the drafter has, by name; the one it decodes with comes last.
        """

    @abstractmethod
    def write(self, folder: Path) -> Mapping[str, Mapping[str, Any]]:
        """Writes the drafter's checkpoint.

        Every process of a run calls it, since weights may be spread over them:
        `treeflash.checkpoints.writing.gathered` brings one together.

        Args:
            folder: An empty folder, of this process alone.

        Returns:
            The tables of a recipe that decodes with it, `checkpoint = "."` where one is named.
        """
