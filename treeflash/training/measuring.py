"""Measuring a drafter on held-out texts while it is trained."""

from collections.abc import Sequence
from typing import Any

import torch

from treeflash.components.trainables.chunked import rows_at_once
from treeflash.packed_text import PackedText
from treeflash.trainable import Simulation, Task, Trainable
from treeflash.training.corpus import Corpus
from treeflash.training.draws import question_generator
from treeflash.training.states import States
from treeflash.training.texts import pack, passes

# Held-out texts are asked the same in every measurement, whatever the run's seed.
_SEED = 0


class HeldOut:
    """The held-out texts and what is asked about them.

    Args:
        trainable: What is measured.
        corpus: Where the texts are.
        states: What the target makes of them.
        length: Tokens in a pass at most.
    """

    def __init__(self, trainable: Trainable, corpus: Corpus, states: States, length: int) -> None:
        self.trainable, self.states = trainable, states
        self.rows: list[tuple[list[int], PackedText, Task]] = []
        texts, first = corpus.heldout, len(corpus.train)
        for group in passes(texts.lengths.tolist(), length):
            row = pack([texts[index] for index in group], trainable.target.device)
            generators = [question_generator(_SEED, 0, index) for index in group]
            self.rows.append(([first + index for index in group], row, trainable.ask(row, generators)))

    def measure(self) -> dict[str, Any]:
        """Simulates drafting along all of them.

        Returns:
            For each distribution its `Simulation.summary()`; the one that decodes comes last.
        """
        total = self._simulate(self.rows)
        return {name: simulation.summary() for name, simulation in total.items()}

    def measure_first(self, texts: int) -> tuple[list[int], float]:
        """Simulates drafting along the first few of them.

        Args:
            texts: How many at least; there are as many more as share a pass with the last.

        Returns:
            Their numbers in the corpus, and tokens a step of the distribution that decodes.
        """
        rows, numbers = list[tuple[list[int], PackedText, Task]](), list[int]()
        for row in self.rows:
            if len(numbers) >= texts:
                break
            rows.append(row)
            numbers += row[0]
        *_, decodes = self._simulate(rows).values()
        return numbers, decodes.emitted / max(1.0, decodes.blocks)

    def _simulate(self, rows: Sequence[tuple[list[int], PackedText, Task]]) -> dict[str, Simulation]:
        total: dict[str, Simulation] = {}
        for numbers, row, task in rows:
            for name, part in self.trainable.simulate(task, self.states.read(numbers, row)).items():
                total[name] = total[name] + part if name in total else part
        return total

    @torch.no_grad()
    def left_out(self, columns: torch.Tensor) -> float:
        """Probability that the target gives, on average, to tokens outside a shortlist.

        Args:
            columns: int64 `[V']`.

        Returns:
            A share, 0 to 1.
        """
        target = self.trainable.target
        head = target.head(None, target.dtype)
        mass = rows = 0.0
        for numbers, row, _ in self.rows:
            normed = self.states.read(numbers, row).normed
            for piece in torch.split(_speaking(row, normed), rows_at_once(target.vocab_size, normed.device)):
                probabilities = target.finish(head(piece).float()).softmax(dim=-1)
                mass += float(piece.shape[0] - probabilities[:, columns.to(piece.device)].sum())
                rows += piece.shape[0]
        return mass / max(1.0, rows)


def _speaking(row: PackedText, normed: torch.Tensor) -> torch.Tensor:
    """The states behind which the target wrote a token."""
    return torch.cat(
        [normed[begin - 1 : end - 1] for begin, end in zip(row.answers, row.bounds[1:], strict=True)]
    )


def headline(measured: dict[str, Any]) -> float:
    """Block efficiency of the distribution that decodes."""
    names: Sequence[str] = list(measured)
    return float(measured[names[-1]]["block_efficiency"])
