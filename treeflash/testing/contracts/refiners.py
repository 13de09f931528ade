"""What the engine expects of a refiner."""

import torch

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.top_m import TopM
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.interfaces import Refiner
from treeflash.target import HuggingFaceTarget
from treeflash.testing.contracts.contract import Contract, check_lossless, check_options
from treeflash.types import BlockDraft


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
            assert ids.dtype == torch.int64
            assert log_probs.dtype == torch.float32
            assert ids.shape == log_probs.shape
            assert ids.shape[:2] == (1, len(slots))
            assert ids.shape[2] <= k
            assert bool((log_probs.diff(dim=-1) <= 0).all()), "the likeliest children come first"
            assert bool((log_probs <= 1e-4).all())
            assert bool((log_probs.exp().sum(dim=-1) <= 1 + 1e-3).all())
            assert all(len(set(row)) == len(row) for row in ids[0].tolist()), "a token stands twice"

    @torch.inference_mode()
    def test_contexts_do_not_know_each_other(self) -> None:
        """All in one pass gives what each by itself gives."""
        _, refiner, draft = self._ready()
        slots, previous = self._contexts(refiner, draft)
        ids, log_probs = refiner.children(draft, slots, previous, 3)
        for index in range(len(slots)):
            one = slice(index, index + 1)
            alone = refiner.children(draft, slots[one], previous[:, one], 3)
            assert alone[0].tolist() == ids[:, one].tolist()
            torch.testing.assert_close(alone[1], log_probs[:, one], atol=1e-4, rtol=1e-4)

    def test_the_text_is_the_targets_own(self) -> None:
        """Whatever it says, asked beforehand or level by level."""
        for builder in (TopM(4, 4), Frontier(4)):
            target = self.target()
            drafter, refiner = self.trained_drafter(target), self.make(target)
            check_lossless(Decoder(target, drafter, builder, refiner, OptTree(9)))

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
