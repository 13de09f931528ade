"""A refiner that corrects logits, not hidden states: a low-rank score of each pair of tokens."""

from collections.abc import Callable
from typing import ClassVar, Self

import attrs
import torch
from attrs.validators import ge
from torch import Tensor, nn

from treeflash.checkpoints.reader import Checkpoint
from treeflash.components.refiners.trained import (
    Contexts,
    Lesson,
    RefinerTrainingOptions,
    TrainedRefiner,
    reset_weights,
)
from treeflash.interfaces import BuildContext
from treeflash.target_interface import Target
from treeflash.types import BlockDraft


class BilinearNetwork(nn.Module):
    """Weights of the score.

    Args:
        hidden: D.
        vocabulary: Rows of both tables.
        rank: Numbers per token.
    """

    def __init__(self, hidden: int, vocabulary: int, rank: int) -> None:
        super().__init__()
        self.predecessor = nn.Embedding(vocabulary, rank)
        self.projection = nn.Linear(hidden, rank)
        self.successor = nn.Embedding(vocabulary, rank)

    def reset(self, generator: torch.Generator) -> None:
        """Gives the weights their first values.

        The score is zero at first. The projection starts at one, whatever the hidden state: so the first
        thing learned is which token follows which.
        """
        reset_weights(self, generator, zero="successor.weight")
        with torch.no_grad():
            self.projection.bias.fill_(1.0)


@attrs.frozen
class BilinearOptions:
    """What a recipe says of the refiner.

    Attributes:
        checkpoint: Folder or hub name of the checkpoint; the drafter's when not given.
        candidates: Of each position's likeliest tokens, how many are scored anew; the others keep
            their probability, up to the common normaliser.
    """

    checkpoint: str | None = None
    candidates: int = attrs.field(default=64, validator=ge(1))


@attrs.frozen
class BilinearTrainingOptions(RefinerTrainingOptions):
    """What a training recipe says of the refiner.

    Attributes:
        rank: Numbers per token.
    """

    rank: int = attrs.field(default=64, validator=ge(1))


@attrs.define(eq=False)
class Bilinear(TrainedRefiner):
    """Adds `<predecessor[y] * projection(normed), successor[v]>` to the marginal logit of `v`.

    Nothing as wide as the vocabulary is computed per context: the backbone's own distribution gives
    the candidates, and what they had and now have of its mass gives the normaliser.

    Attributes:
        candidates: As in the options.
    """

    Options: ClassVar[type | None] = BilinearOptions
    TrainingOptions: ClassVar[type] = BilinearTrainingOptions
    layout: ClassVar[str] = "bilinear"

    candidates: int = 64

    @classmethod
    def from_options(cls, options: BilinearOptions, context: BuildContext) -> Self:
        """Reads the checkpoint, then sets the number of candidates."""
        refiner = super().from_options(options, context)
        refiner.candidates = options.candidates
        return refiner

    @classmethod
    def make_network(cls, checkpoint: Checkpoint, target: Target) -> nn.Module:
        """Takes the rank from the stored table."""
        table = checkpoint.refiner.get("predecessor.weight")
        rank = table.shape[-1] if table is not None and table.shape else 1
        return BilinearNetwork(target.hidden_size, target.vocab_size, rank)

    @classmethod
    def fresh_network(
        cls, options: BilinearTrainingOptions, target: Target, intermediate_size: int
    ) -> nn.Module:
        """Takes the rank from the options."""
        return BilinearNetwork(target.hidden_size, target.vocab_size, options.rank)

    def lesson(self, contexts: Contexts) -> Lesson:
        """Adds the score of each token to the backbone's own logits."""
        network, normed, columns = self.network, contexts.normed, contexts.columns
        queries = network.predecessor(contexts.previous[:, 0]) * network.projection(normed)
        table = network.successor.weight if columns is None else network.successor(columns)

        def logits(head: Callable[[Tensor], Tensor], own: Tensor, query: Tensor, table: Tensor) -> Tensor:
            return head(own) + query @ table.T

        return Lesson((normed, queries), (table,), logits)

    def children(self, draft: BlockDraft, slots: Tensor, previous: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores the candidates anew."""
        network = self.network
        ids, log_probs = draft.top_k(max(self.candidates, k))
        keys = network.successor(ids)
        queries = network.predecessor(previous[..., 0]) * network.projection(draft.normed)[:, slots]
        scores = torch.einsum("bfr,bfcr->bfc", queries, keys[:, slots]).float() / draft.head.temperature
        others = draft.log_mass_outside(ids)[:, slots]
        ids, log_probs = ids[:, slots], log_probs[:, slots]
        refined = log_probs + scores
        total = torch.logaddexp(torch.logsumexp(refined, dim=-1, keepdim=True), others)
        best, order = (refined - total).topk(min(k, refined.shape[-1]), dim=-1)
        return ids.gather(2, order), best
