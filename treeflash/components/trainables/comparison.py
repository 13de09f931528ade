"""Comparing drafted distributions with the target's along the positions of a row."""

from collections.abc import Callable

import attrs
import torch
from torch import Tensor

from treeflash.components.refiners.trained import Lesson
from treeflash.components.trainables.chunked import chunked_sum, rows_at_once
from treeflash.trainable import Loss, Simulation, TrainingTarget


@attrs.frozen(eq=False)
class Answers:
    """What is wanted at some positions.

    Attributes:
        wanted: `[R, D]`: the target's states that say what comes next.
        labels: int64 `[R]`: the token that does; None where no text says one, and the target's likeliest
            token stands for it.
        weights: float32 `[R]`.
    """

    wanted: Tensor
    labels: Tensor | None
    weights: Tensor


@attrs.frozen(eq=False)
class Comparison:
    """A loss over a head.

    Attributes:
        loss: Compares distributions.
        target: Whose they should be.
        columns: int64 `[V']`: the tokens looked at; None for all.
        head: Output head over these.
        column_of: int64 `[V]`: where a token is among them, -1 where it is not.
    """

    loss: Loss
    target: TrainingTarget
    columns: Tensor | None
    head: Callable[[Tensor], Tensor]
    column_of: Tensor

    @classmethod
    def make(
        cls, loss: Loss, target: TrainingTarget, columns: Tensor | None, dtype: torch.dtype
    ) -> "Comparison":
        """Gathers the head.

        Args:
            loss: The loss.
            target: The target.
            columns: int64 `[V']`, or None.
            dtype: In which the head computes.
        """
        ids = torch.arange(target.vocab_size) if columns is None else columns.cpu()
        column_of = torch.full((target.vocab_size,), -1)
        column_of[ids] = torch.arange(len(ids))
        place = None if columns is None else columns.to(target.device)
        return cls(loss, target, place, target.head(place, dtype), column_of.to(target.device))

    def log_probs(self, wanted: Tensor) -> Tensor:
        """The target's own log-probabilities over the columns, float32 `[R, V']`, without gradient."""
        with torch.no_grad():
            return self.target.finish(self.head(wanted).float()).log_softmax(dim=-1)

    def total(
        self,
        answers: Answers,
        lesson: Lesson | None,
        own: Tensor | None,
        own_weight: float,
    ) -> Tensor:
        """The loss of the refined distribution plus that of the backbone's own, summed over rows.

        Args:
            answers: What is wanted, R rows.
            lesson: The refined distributions, R rows; None without.
            own: `[R, D]`: the backbone's states behind its norm; None when they do not count.
            own_weight: What they count.

        Returns:
            A float32 scalar, with gradient.
        """
        loss, head, unlabelled = self.loss, self.head, answers.labels is None
        labels = answers.weights if answers.labels is None else self.column_of[answers.labels]
        extra = () if own is None else (own,)
        lesson_rows, tables = ((), ()) if lesson is None else (lesson.rows, lesson.tables)

        def of_chunk(wanted: Tensor, labels: Tensor, weights: Tensor, *rest: Tensor) -> Tensor:
            log_probs = self.log_probs(wanted)
            columns = log_probs.argmax(dim=-1) if unlabelled else labels
            total = weights.new_zeros(())
            if lesson is not None:
                logits = lesson.logits(head, *rest[len(extra) :]).float()
                total = total + (loss.rows(logits, log_probs, columns) * weights).sum()
            if extra:
                values = loss.rows(head(rest[0]).float(), log_probs, columns)
                total = total + own_weight * (values * weights).sum()
            return total

        rows = (answers.wanted, labels, answers.weights, *extra, *lesson_rows)
        width = self.target.vocab_size if self.columns is None else len(self.columns)
        return chunked_sum(of_chunk, rows, tables, step=rows_at_once(width, answers.wanted.device))


def measure(
    target: TrainingTarget,
    head: Callable[[Tensor], Tensor],
    wanted: Tensor,
    labels: Tensor,
    lessons: dict[str, Lesson],
    left: Tensor,
    columns: Tensor | None = None,
) -> dict[str, Simulation]:
    """Compares distributions with the target's over the whole vocabulary.

    Args:
        target: The target.
        head: Its output head over all tokens.
        wanted: `[A * P, D]`.
        labels: int64 `[A, P]`.
        lessons: The distributions, by name.
        left: int64 `[A]` on the CPU: tokens that the text has after each anchor, one at least; the first so
            many rows of its P have a label.
        columns: int64 `[V']`: the tokens that can be drafted; None for all.

    Returns:
        A measurement for each.
    """
    count, device = wanted.shape[0], wanted.device
    valid = torch.arange(1, 1 + labels.shape[1])[None] <= left[:, None]
    hits = {name: torch.zeros(count, dtype=torch.bool, device=device) for name in lessons}
    distances = {name: torch.zeros(count, device=device) for name in lessons}
    step = rows_at_once(target.vocab_size, device)
    for start in range(0, count, step):
        span = slice(start, start + step)
        p = target.finish(head(wanted[span]).float()).softmax(dim=-1)
        for name, lesson in lessons.items():
            logits = lesson.logits(head, *(part[span] for part in lesson.rows), *lesson.tables).float()
            if columns is not None:
                beyond = torch.full_like(logits, -torch.inf)
                logits = beyond.index_copy_(1, columns, logits[:, columns])
            hits[name][span] = logits.argmax(dim=-1) == labels.flatten()[span]
            distances[name][span] = (p - logits.softmax(dim=-1)).abs().sum(dim=-1) / 2

    def simulation(name: str) -> Simulation:
        hit = hits[name].cpu().view_as(valid) & valid
        distance = distances[name].cpu().view_as(valid) * valid
        accepted = hit.long().cumprod(dim=1).sum(dim=1)
        return Simulation(
            rows=valid.sum(dim=0).double(),
            hits=hit.sum(dim=0).double(),
            divergence=distance.double().sum(dim=0),
            blocks=float(len(valid)),
            # As when decoding: what was accepted and one token more, unless the text ends before it.
            emitted=float(torch.minimum(accepted + 1, left).sum()),
        )

    return {name: simulation(name) for name in lessons}
