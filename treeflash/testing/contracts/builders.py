"""What the engine expects of a tree builder."""

import torch

from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.interfaces import Refiner, TreeBuilder
from treeflash.places import locate
from treeflash.testing.contracts.contract import (
    MODELS,
    Contract,
    check_lossless,
    check_options,
)
from treeflash.types import BlockDraft, DraftHead, Lattice, Limits, OnDemand

# A made-up draft: so many positions, each with so many likely tokens of its own.
_POSITIONS, _LIKELY, _VOCABULARY = 5, 8, 64


class BuilderContract(Contract):
    """Subclass it and say how the builder is made."""

    def make(self) -> TreeBuilder:
        """Makes the builder."""
        raise NotImplementedError

    def test_it_can_be_configured(self) -> None:
        """Options are an attrs class, and it is documented."""
        check_options(self.make())

    @torch.inference_mode()
    def test_contexts_are_laid_out_as_a_refiner_reads_them(self) -> None:
        """Shapes and dtypes; the anchor's context at depth 1; no context twice at a depth."""
        builder, draft = self.make(), self.block_draft(self.target())
        for history in range(type(builder).min_history, type(builder).max_history + 1):
            for depth in (1, draft.depth):
                cut = BlockDraft(draft.recent, draft.hidden[:, :depth], draft.normed[:, :depth], draft.head)
                lattice = builder.build(cut, history, Limits(8, depth))
                assert isinstance(lattice, Lattice | OnDemand)
                assert lattice.children >= 1
                if isinstance(lattice, Lattice):
                    self._check(lattice, draft, history, depth)

    @torch.inference_mode()
    def test_contexts_come_from_the_depth_above(self) -> None:
        """Each position of a draft has likely tokens of its own, so a context shows where it is from."""
        builder, draft = self.make(), _draft_of_ranges()
        for history in range(1, type(builder).max_history + 1):
            lattice = builder.build(draft, history, Limits(8, draft.depth))
            if not isinstance(lattice, Lattice):
                continue
            for level in range(1, draft.depth):
                kept = lattice.contexts[0, level][lattice.is_context[0, level]]
                # The tokens of a context, from the last back, are drafted at the positions above it.
                for back in range(history):
                    slot = level - 1 - back
                    wanted = set(_likely(slot)) if slot >= 0 else {int(draft.recent[0, 1])}
                    found = set(kept[:, history - 1 - back].tolist())
                    assert found <= wanted, (
                        f"history {history}, depth {level + 1}: expected tokens {back + 1} back to be "
                        f"among {sorted(wanted)}, found {sorted(found - wanted)}"
                    )

    def test_the_text_is_the_targets_own(self) -> None:
        """Whatever it lays out."""
        target, builder = self.target(), self.make()
        refiner: Refiner = NoRefiner()
        if type(builder).max_history:
            refiner = SwiGlu.from_checkpoint(locate(f"{MODELS}/tiny-treeflash"), target)
        check_lossless(Decoder(target, self.trained_drafter(target), builder, refiner, OptTree(9)))

    def _check(self, lattice: Lattice, draft: BlockDraft, history: int, depth: int) -> None:
        contexts, is_context = lattice.contexts, lattice.is_context
        asked = f"history {history}, {depth} positions"
        assert contexts.dtype == torch.int64, asked
        assert is_context.dtype == torch.bool, asked
        assert contexts.shape == (*is_context.shape, history), asked
        assert contexts.shape[:2] == (1, depth), f"{asked}: contexts for each position of the draft"
        first = contexts[0, 0][is_context[0, 0]]
        assert first.tolist() == [draft.recent[0, 2 - history :].tolist()], (
            f"{asked}: depth 1 has one context"
        )
        for level in range(depth):
            kept = [tuple(row) for row in contexts[0, level][is_context[0, level]].tolist()]
            assert kept, f"{asked}: no context at depth {level + 1}"
            assert len(set(kept)) == len(kept), f"{asked}: a context twice at depth {level + 1}"


def _likely(slot: int) -> range:
    """Tokens that the made-up draft thinks likely at a position."""
    return range(slot * _LIKELY, (slot + 1) * _LIKELY)


def _draft_of_ranges() -> BlockDraft:
    """A draft whose positions share no likely token; its states are the logits themselves."""
    logits = torch.full((1, _POSITIONS, _VOCABULARY), -30.0)
    for slot in range(_POSITIONS):
        logits[0, slot, list(_likely(slot))] = -0.1 * torch.arange(_LIKELY, dtype=torch.float32)
    head = DraftHead(
        embed=lambda ids: torch.nn.functional.one_hot(ids, _VOCABULARY).float(),
        norm=lambda states: states,
        project=lambda states: states,
        vocab_size=_VOCABULARY,
    )
    recent = torch.tensor([[_VOCABULARY - 2, _VOCABULARY - 1]])
    return BlockDraft(recent, logits, logits, head)
