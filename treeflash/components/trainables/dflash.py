"""Training of block drafters and the refiners behind them.

Source: DFlash (blocks, position weights) and TreeFlash (the refined distribution beside the backbone's own).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from attrs.validators import and_, ge, in_, le, optional
from torch import Tensor, nn

from treeflash.checkpoints.shortlist import write_shortlist
from treeflash.checkpoints.writing import write_checkpoint
from treeflash.components.refiners.trained import Contexts, Lesson, TrainedRefiner
from treeflash.components.trainables.blocks import Blocks, draw_anchors, position_weights
from treeflash.components.trainables.comparison import Answers, Comparison, measure
from treeflash.components.trainables.dflash_start import DFlashSizes, Start, start_network, start_refiner
from treeflash.components.trainables.on_policy import own_contexts
from treeflash.errors import CompositionError
from treeflash.packed_text import PackedText, ReadText
from treeflash.ranges import MOST_NODES
from treeflash.trainable import Simulation, Task, Trainable, TrainContext, TrainingTarget
from treeflash.types import BlockDraft, DraftHead

TEXT, TREE = "text", "tree"
# Trees that the target reads in one pass.
_TREES = 64


@attrs.frozen
class DFlashTrainingOptions(DFlashSizes):
    """What a training recipe says of the drafter.

    Attributes:
        frozen: Keep the backbone as it is and train the refiner alone.
        fresh_refiner: Start the refiner anew even where the backbone's checkpoint has one of its kind.
        anchors: Blocks drawn in each text, each time it is read.
        decay: Of the position weights `exp(-(k - 1) / decay)`; 0 counts all slots alike. When not given,
            7, 5 or 4 for blocks of 16, 10 or 8, and half the block otherwise.
        backbone_weight: What the backbone's own loss counts beside the refined one.
        previous: Tokens a refiner is taught behind: those of the "text" (teacher forcing), or those of the
            drafter's own "tree" (on-policy).
        tree_budget: Nodes of such a tree.
    """

    frozen: bool = False
    fresh_refiner: bool = False
    anchors: int = attrs.field(default=64, validator=ge(1))
    decay: float | None = attrs.field(default=None, validator=optional(ge(0)))
    backbone_weight: float = attrs.field(default=1.0, validator=ge(0))
    previous: str = attrs.field(default=TEXT, validator=in_((TEXT, TREE)))
    tree_budget: int = attrs.field(default=15, validator=and_(ge(1), le(MOST_NODES)))


@attrs.frozen(eq=False)
class Questions:
    """Blocks along a row.

    Attributes:
        blocks: Where.
        weights: float32 `[A, P]` on the CPU: what each drafted slot counts, 0 without a label.
    """

    blocks: Blocks
    weights: Tensor


class DFlashTrainable(Trainable):
    """A block drafter and, behind it, a refiner that has weights.

    Args:
        start: The backbone.
        refiner: The refiner; None trains the backbone alone.
        target: The target.
        comparison: The loss.
        options: How to train.
    """

    Options = DFlashTrainingOptions
    trains_refiners = True

    def __init__(
        self,
        start: Start,
        refiner: TrainedRefiner | None,
        target: TrainingTarget,
        comparison: Comparison,
        options: DFlashTrainingOptions,
    ) -> None:
        super().__init__()
        self.network = start.network.requires_grad_(not options.frozen)
        self.refiner = refiner
        self.refiner_network: nn.Module | None = None if refiner is None else refiner.network
        self.config, self.target, self.comparison, self.options = start.config, target, comparison, options
        self.tap_layers = start.facts.target_layer_ids
        self.block_size: int = start.facts.block_size
        self.mask_token_id: int = start.facts.mask_token_id
        if refiner is not None:
            refiner.network.requires_grad_(True)

    @classmethod
    def from_options(cls, options: DFlashTrainingOptions, context: TrainContext) -> Self:
        """Builds the backbone, from wherever it starts, and the refiner."""
        target, kind = context.target, context.refiner
        if kind is not None and not issubclass(kind, TrainedRefiner):
            if kind.history:
                raise CompositionError(
                    f"refiner {kind.__name__} cannot be trained: expected a TrainedRefiner, or one that "
                    "looks at no token before"
                )
            kind = None
        if options.previous == TREE and kind is None:
            raise CompositionError('drafter.previous = "tree": expected a refiner with weights, found none')
        if options.frozen and options.checkpoint is None:
            raise CompositionError("drafter.frozen: expected a drafter.checkpoint to keep, found none")
        if options.frozen and kind is None:
            raise CompositionError(
                "nothing is left to train: the backbone is frozen, and the recipe has no refiner with weights"
            )
        if options.fresh_refiner and (
            options.checkpoint is None or getattr(context.refiner_options, "checkpoint", None) is not None
        ):
            raise CompositionError(
                "drafter.fresh_refiner: expected a drafter.checkpoint whose refiner is left alone, and no "
                "refiner.checkpoint"
            )
        start = start_network(options, target, context.locate, context.generator)
        refiner = None
        if kind is not None:
            beside = None if options.fresh_refiner else options.checkpoint
            refiner = start_refiner(kind, context, beside, start.config)
        comparison = Comparison.make(context.loss, target, context.columns, context.dtype)
        return cls(start, refiner, target, comparison, options)

    def ask(self, text: PackedText, generators: Sequence[torch.Generator]) -> Task:
        """Draws anchors; each opens a block."""
        blocks = Blocks(text, draw_anchors(text, self.options.anchors, generators), self.block_size)
        decay = _decay(self.options.decay, self.block_size)
        labelled = blocks.has_label()
        weights = position_weights(self.block_size - 1, decay) * labelled
        return Task(Questions(blocks, weights), float(weights.sum()), int(labelled.sum()))

    def forward(self, task: Task, read: ReadText) -> Tensor:
        """Drafts the blocks as inference would and compares with the target."""
        questions: Questions = task.questions
        hidden, normed = self._draft(read, questions.blocks)
        rows = questions.blocks.rows()
        counted = questions.weights.flatten().nonzero()[:, 0]
        weights = questions.weights.flatten()[counted].to(rows.device, non_blocking=True)
        picked = counted.to(rows.device, non_blocking=True)
        answers = Answers(
            wanted=read.normed[rows[:, :-1]].flatten(0, 1)[picked],
            labels=read.text.token_ids[rows[:, 1:]].flatten()[picked],
            weights=weights,
        )
        own_weight = 0.0 if self.options.frozen else self.options.backbone_weight
        own = normed.flatten(0, 1)[picked]
        if self.refiner is None:
            return self.comparison.total(answers, None, own, 1.0)
        beside = own if own_weight else None
        if self.options.previous == TREE:
            refined = self._on_policy(read, questions, hidden, normed)
            if beside is not None:
                refined = refined + self.comparison.total(answers, None, own, own_weight)
            return refined
        previous = self._histories(read.text, rows).flatten(0, 1)[picked]
        lesson = self._lesson(hidden.flatten(0, 1)[picked], own, previous, self.comparison.columns)
        return self.comparison.total(answers, lesson, beside, own_weight)

    @torch.no_grad()
    def simulate(self, task: Task, read: ReadText) -> Mapping[str, Simulation]:
        """Looks at the backbone's own distributions and, by teacher forcing, at the refined ones."""
        questions: Questions = task.questions
        hidden, normed = (part.flatten(0, 1) for part in self._draft(read, questions.blocks))
        rows = questions.blocks.rows()
        lessons = {"backbone": Lesson((normed,), (), lambda head, own: head(own))}
        if self.refiner is not None:
            previous = self._histories(read.text, rows).flatten(0, 1)
            lessons["refined"] = self._lesson(hidden, normed, previous, None)
        return measure(
            self.target,
            self.target.head(None, self.target.dtype),
            read.normed[rows[:, :-1]].flatten(0, 1),
            read.text.token_ids[rows[:, 1:]],
            lessons,
            questions.blocks.left(),
            self.comparison.columns,
        )

    def write(self, folder: Path) -> Mapping[str, Mapping[str, Any]]:
        """Writes the DFlash layout, or with a refiner the TreeFlash layout."""
        config = dict(self.config)
        refiner = self.refiner
        layout = "none" if refiner is None else refiner.layout
        if refiner is None:
            for key in ("treeflash_config", "ar_approximation"):
                config.pop(key, None)
        else:
            config["treeflash_config"] = {**config.get("treeflash_config", {}), "ar_approximation": layout}
        config["dtype"] = str(self.target.dtype).removeprefix("torch.")
        write_checkpoint(
            folder, config, self.network, None if refiner is None else refiner.network, self.target.dtype
        )
        if self.comparison.columns is not None:
            write_shortlist(folder, self.comparison.columns)
        return {
            "drafter": {"use": "dflash", "checkpoint": "."},
            "builder": {"use": "marginal" if refiner is None else "top-m"},
            "refiner": {"use": layout},
        }

    def _draft(self, read: ReadText, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """States of the drafted slots before and behind the final norm, `[A, P, D]` each."""
        text, size = read.text, blocks.block_size
        anchors = text.token_ids[blocks.anchor_rows][:, None]
        slots = torch.cat([anchors, anchors.new_full((len(anchors), size - 1), self.mask_token_id)], dim=1)
        hidden, normed = self.network.forward_blocks(
            self._embed(slots).flatten(0, 1)[None],
            read.taps[None].float(),
            blocks.positions().flatten()[None],
            text.positions[None],
            blocks.pieces(),
        )
        # Slot k predicts the token at slot k; slot 0 is the anchor itself.
        hidden, normed = (states[0].view(-1, size, states.shape[-1])[:, 1:] for states in (hidden, normed))
        return hidden, normed

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids).detach().float()

    def _lesson(self, hidden: Tensor, normed: Tensor, previous: Tensor, columns: Tensor | None) -> Lesson:
        assert self.refiner is not None, "asked for with a refiner alone"
        return self.refiner.lesson(
            Contexts(hidden, normed, previous, self._embed, self.network.norm, columns)
        )

    def _histories(self, text: PackedText, rows: Tensor) -> Tensor:
        """The true tokens before each drafted slot, int64 `[A, P, history]`, the older first."""
        assert self.refiner is not None, "asked for with a refiner alone"
        previous = text.token_ids[rows[:, :-1]]
        if self.refiner.history == 1:
            return previous[..., None]
        # A block's anchor has a token before it: a text begins with its prompt.
        older = text.token_ids[(rows[:, :-1] - 1).clamp(min=0)]
        return torch.stack([older, previous], dim=-1)

    def _on_policy(self, read: ReadText, questions: Questions, hidden: Tensor, normed: Tensor) -> Tensor:
        """The refined loss over contexts from the drafter's own trees."""
        assert self.refiner is not None, "asked for with a refiner alone"
        text, blocks = read.text, questions.blocks
        anchors, weights = blocks.anchor_rows, questions.weights.to(hidden.device, non_blocking=True)
        before = text.token_ids[(anchors - 1).clamp(min=0)]
        recent = torch.stack([before, text.token_ids[anchors]], dim=1)
        columns = self.comparison.columns
        project = self.target.head(columns, self.target.dtype)
        head = DraftHead(self._embed, self.network.norm, project, self.target.vocab_size, columns=columns)
        total = hidden.new_zeros(())
        for start in range(0, len(anchors), _TREES):
            group = slice(start, start + _TREES)
            draft = BlockDraft(recent[group], hidden[group].detach(), normed[group].detach(), head)
            budget = self.options.tree_budget
            nodes = own_contexts(self.target, self.refiner, draft, text, anchors[group], budget)
            # Past the end of its text a block counts for nothing.
            counts = weights[group][nodes.block, nodes.slot] * nodes.weight
            lesson = self._lesson(
                hidden[group][nodes.block, nodes.slot],
                normed[group][nodes.block, nodes.slot],
                nodes.previous,
                self.comparison.columns,
            )
            total = total + self.comparison.total(Answers(nodes.wanted, None, counts), lesson, None, 0.0)
        return total


def _decay(decay: float | None, block_size: int) -> float | None:
    if decay is None:
        return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, block_size / 2)
    return decay or None
