"""What the engine expects of a refiner."""

from collections.abc import Callable

import attrs
import torch

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.trained import Contexts, TrainedRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.interfaces import Refiner
from treeflash.target import HuggingFaceTarget
from treeflash.testing.contracts.contract import Contract, check_lossless, check_options
from treeflash.types import BlockDraft, DraftHead

_SHORTLIST = range(32, 126, 3)  # every third printable character


def _told(where: str) -> Callable[[str], str]:
    """Puts a place before the message of a comparison."""
    return lambda text: f"{where}: {text}"


class RefinerContract(Contract):
    """Subclass it and say how the refiner is made."""

    def make(self, target: HuggingFaceTarget) -> Refiner:
        """Makes the refiner, not bound yet.

        Args:
            target: Whose drafts it refines.
        """
        raise NotImplementedError

    def test_it_can_be_configured(self) -> None:
        """Options are an attrs class, and it is documented."""
        refiner = self.make(self.target())
        check_options(refiner)
        assert type(refiner).history in (0, 1, 2)

    @torch.inference_mode()
    def test_children_come_by_falling_probability(self) -> None:
        """Shapes, dtypes, distinct tokens, probabilities that add up to at most 1."""
        target, refiner, draft = self._ready()
        slots, previous = self._contexts(refiner, draft)
        for k in (1, 5, target.vocab_size):
            ids, log_probs = refiner.children(draft, slots, previous, k)
            asked = f"asked for {k} children"
            assert ids.dtype == torch.int64, asked
            assert log_probs.dtype == torch.float32, asked
            assert ids.shape == log_probs.shape, asked
            assert ids.shape[:2] == (1, len(slots)), asked
            assert ids.shape[2] <= k, asked
            assert bool((log_probs.diff(dim=-1) <= 0).all()), f"{asked}: the likeliest come first"
            assert float(log_probs.max()) <= 1e-4, f"{asked}: a log-probability above 0"
            assert float(log_probs.exp().sum(dim=-1).max()) <= 1 + 1e-3, f"{asked}: more than 1 in all"
            for slot, row in zip(slots.tolist(), ids[0].tolist(), strict=True):
                assert len(set(row)) == len(row), f"{asked}: a token twice at depth {slot + 1}"

    @torch.inference_mode()
    def test_contexts_do_not_know_each_other(self) -> None:
        """All in one pass gives what each by itself gives."""
        _, refiner, draft = self._ready()
        slots, previous = self._contexts(refiner, draft)
        ids, log_probs = refiner.children(draft, slots, previous, 3)
        for index in range(len(slots)):
            one = slice(index, index + 1)
            alone = refiner.children(draft, slots[one], previous[:, one], 3)
            where = f"context {index}, at depth {int(slots[index]) + 1}"
            assert alone[0].tolist() == ids[:, one].tolist(), f"{where}: other children than beside others"
            torch.testing.assert_close(alone[1], log_probs[:, one], atol=1e-4, rtol=1e-4, msg=_told(where))

    @torch.inference_mode()
    def test_children_are_what_training_computes(self) -> None:
        """A trained refiner's `children` are the log-softmax of its `lesson`, over any head."""
        target, refiner, draft = self._ready()
        if not isinstance(refiner, TrainedRefiner):
            return
        slots, previous = self._contexts(refiner, draft)
        for name, head in self._heads(target, draft.head).items():
            drafted = BlockDraft(draft.recent, draft.hidden, draft.normed, head)
            contexts = Contexts(
                hidden=drafted.hidden[0, slots],
                normed=drafted.normed[0, slots],
                previous=previous[0],
                embed=head.embed,
                norm=head.norm,
                columns=head.columns,
            )
            lesson = refiner.lesson(contexts)
            logits = lesson.logits(head.project, *lesson.rows, *lesson.tables).float()
            trained = (logits / head.temperature).log_softmax(dim=-1)
            ids, log_probs = refiner.children(drafted, slots, previous, head.width)
            expected = trained.gather(1, head.index(ids[0]))
            torch.testing.assert_close(
                log_probs[0],
                expected,
                atol=1e-3,
                rtol=1e-3,
                msg=_told(f"over {name}, children differ from what training computes"),
            )

    def test_the_text_is_the_targets_own(self) -> None:
        """Whatever it says, asked beforehand or level by level."""
        for builder in (TopM(4, 4), Frontier(4)):
            target = self.target()
            drafter, refiner = self.trained_drafter(target), self.make(target)
            check_lossless(Decoder(target, drafter, builder, refiner, OptTree(9)))

    def _heads(self, target: HuggingFaceTarget, head: DraftHead) -> dict[str, DraftHead]:
        """The head as it is, with a temperature, and over a shortlist."""
        columns = torch.tensor(_SHORTLIST, device=target.device)
        short = attrs.evolve(head, columns=columns, project=target.head(columns, target.dtype))
        return {
            "all tokens": head,
            "all tokens at temperature 0.7": attrs.evolve(head, temperature=0.7),
            "a shortlist": short,
            "a shortlist at temperature 1.5": attrs.evolve(short, temperature=1.5),
        }

    def _ready(self) -> tuple[HuggingFaceTarget, Refiner, BlockDraft]:
        target = self.target()
        refiner = self.make(target)
        refiner.bind(target)
        return target, refiner, self.block_draft(target)

    def _contexts(self, refiner: Refiner, draft: BlockDraft) -> tuple[torch.Tensor, torch.Tensor]:
        """Several contexts at several depths."""
        random = torch.Generator().manual_seed(0)
        slots = torch.arange(draft.depth).repeat_interleave(2)
        previous = torch.randint(32, 126, (1, len(slots), type(refiner).history), generator=random)
        return slots.to(draft.hidden.device), previous.to(draft.hidden.device)
