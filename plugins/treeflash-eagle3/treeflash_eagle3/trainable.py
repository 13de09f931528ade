"""Training of a head on what it makes of its own outputs.

Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840).
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import attrs
import torch
from attrs.validators import and_, ge, gt, le
from torch import Tensor
from torch.nn import functional

from treeflash.checkpoints.writing import write_checkpoint
from treeflash.components.refiners.trained import Lesson
from treeflash.components.trainables.chunked import chunked_sum, rows_at_once
from treeflash.components.trainables.comparison import Comparison, measure
from treeflash.errors import CompositionError
from treeflash.packed_text import PackedText, ReadText
from treeflash.trainable import Simulation, Task, Trainable, TrainContext, TrainingTarget
from treeflash_eagle3.drafter import CHILDREN
from treeflash_eagle3.layout import Eagle3Facts, config_of_network
from treeflash_eagle3.network import Eagle3Network
from treeflash_eagle3.start import Eagle3Sizes, start_network
from treeflash_eagle3.unrolling import Roots, unroll


@attrs.frozen
class Eagle3TrainingOptions(Eagle3Sizes):
    """What a training recipe says of the drafter.

    Attributes:
        unroll: Tokens drafted behind each position, the later ones from the head's own outputs; decoding
            drafts as many levels.
        decay: What each of them counts, of the one before.
        children: Children drafted below a node when the drafter decodes.
    """

    unroll: int = attrs.field(default=7, validator=ge(1))
    decay: float = attrs.field(default=0.8, validator=and_(gt(0), le(1)))
    children: int = attrs.field(default=CHILDREN, validator=ge(1))


@attrs.frozen(eq=False)
class Questions:
    """Chains along a row.

    Attributes:
        roots: Where they start.
        weights: float32 `[R, P]` on the CPU: what each link counts, 0 without a label.
    """

    roots: Roots
    weights: Tensor


class Eagle3Trainable(Trainable):
    """An EAGLE-3 head.

    Args:
        network: The head.
        facts: What its checkpoint's config says.
        target: The target.
        comparison: The loss, over the draft vocabulary.
        options: How to train.
    """

    Options = Eagle3TrainingOptions

    def __init__(
        self,
        network: Eagle3Network,
        facts: Eagle3Facts,
        target: TrainingTarget,
        comparison: Comparison,
        options: Eagle3TrainingOptions,
    ) -> None:
        super().__init__()
        self.network = network
        self.facts, self.target, self.comparison, self.options = facts, target, comparison, options
        self.tap_layers = facts.target_layer_ids

    @classmethod
    def from_options(cls, options: Eagle3TrainingOptions, context: TrainContext) -> Self:
        """Builds a head with first weights."""
        if context.columns is not None:
            raise CompositionError(
                "loss.shortlist: expected none, because this drafter compares over its own vocabulary "
                f"(drafter.draft_vocab_size); found {len(context.columns)}"
            )
        network, facts = start_network(options, context)
        target = context.target
        comparison = Comparison.make(context.loss, target, network.target_ids(), context.dtype)
        return cls(network, facts, target, comparison, options)

    def ask(self, text: PackedText, generators: Sequence[torch.Generator]) -> Task:
        """Asks from every position of the answers; nothing is drawn."""
        roots = Roots.everywhere(text, self.options.unroll)
        labelled = roots.has_label()
        weights = self.options.decay ** torch.arange(roots.links, dtype=torch.float32) * labelled
        return Task(Questions(roots, weights), float(weights.sum()), int(labelled.sum()))

    def forward(self, task: Task, read: ReadText) -> Tensor:
        """Unrolls the head and compares each of its distributions with the target's.

        A token outside the draft vocabulary cannot be drafted, and the rest of its distribution teaches
        little: where the target wrote one, nothing counts.
        """
        questions: Questions = task.questions
        rows = questions.roots.rows()
        counted = questions.weights.flatten().nonzero()[:, 0]
        picked = counted.to(rows.device, non_blocking=True)
        columns = self.comparison.column_of[read.text.token_ids[rows[:, 1:]].flatten()[picked]]
        weights = questions.weights.flatten()[counted].to(rows.device, non_blocking=True) * (columns >= 0)
        wanted = read.normed[rows[:, :-1]].flatten(0, 1)[picked]
        normed = self._unrolled(read, questions.roots)[picked]
        # The gradient of the head's weights is as large as they are, so chunks are no smaller than that.
        step = max(rows_at_once(self.facts.draft_vocab_size, rows.device), normed.shape[1])
        return chunked_sum(
            self._compare, (wanted, columns, weights, normed), (self.network.lm_head.weight,), step=step
        )

    @torch.no_grad()
    def simulate(self, task: Task, read: ReadText) -> Mapping[str, Simulation]:
        """Looks at the head's distributions along chains of the text's own tokens."""
        roots: Roots = task.questions.roots
        rows, ids = roots.rows(), self.network.target_ids()

        def over_all(head: Callable[[Tensor], Tensor], normed: Tensor) -> Tensor:
            logits = self.network.lm_head(normed).float()
            spread = logits.new_full((len(logits), self.target.vocab_size), -torch.inf)
            full: Tensor = spread.index_copy_(1, ids, logits)
            return full

        return measure(
            self.target,
            self.target.head(None, self.target.dtype),
            read.normed[rows[:, :-1]].flatten(0, 1),
            read.text.token_ids[rows[:, 1:]],
            {"eagle3": Lesson((self._unrolled(read, roots),), (), over_all)},
            roots.left(),
        )

    def write(self, folder: Path) -> Mapping[str, Mapping[str, Any]]:
        """Writes the EAGLE-3 layout."""
        dtype = self.target.dtype
        config = config_of_network(self.network.config, self.facts)
        config["dtype"] = str(dtype).removeprefix("torch.")
        write_checkpoint(folder, config, self.network, None, dtype)
        drafter = {"children": self.options.children, "max_depth": self.options.unroll}
        return {"drafter": {"use": "eagle3", "checkpoint": ".", **drafter}}

    def _unrolled(self, read: ReadText, roots: Roots) -> Tensor:
        """The head's states behind its final norm, `[R * P, D]`."""
        embedded = self.target.embed(read.text.token_ids).detach().float()
        outputs = unroll(self.network, embedded, self.network.fc(read.taps.float()), roots)
        normed: Tensor = self.network.norm(outputs.flatten(0, 1))
        return normed

    def _compare(
        self, wanted: Tensor, columns: Tensor, weights: Tensor, normed: Tensor, head: Tensor
    ) -> Tensor:
        """The loss of some rows, given the head's output weights."""
        logits = functional.linear(normed, head).float()
        values = self.comparison.loss.rows(logits, self.comparison.log_probs(wanted), columns)
        total: Tensor = (values * weights).sum()
        return total
