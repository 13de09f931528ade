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
from treeflash.types import BlockDraft, Lattice, Limits, OnDemand


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
        for history in range(type(builder).max_history + 1):
            for depth in (1, draft.depth):
                cut = BlockDraft(draft.recent, draft.hidden[:, :depth], draft.normed[:, :depth], draft.head)
                lattice = builder.build(cut, history, Limits(8, depth))
                assert isinstance(lattice, Lattice | OnDemand)
                assert lattice.children >= 1
                if isinstance(lattice, Lattice):
                    self._check(lattice, draft, history, depth)

    def test_the_text_is_the_targets_own(self) -> None:
        """Whatever it lays out."""
        target, builder = self.target(), self.make()
        refiner: Refiner = NoRefiner()
        if type(builder).max_history:
            refiner = SwiGlu.from_checkpoint(locate(f"{MODELS}/tiny-treeflash"), target)
        check_lossless(Decoder(target, self.trained_drafter(target), builder, refiner, OptTree(9)))

    def _check(self, lattice: Lattice, draft: BlockDraft, history: int, depth: int) -> None:
        contexts, is_context = lattice.contexts, lattice.is_context
        assert contexts.dtype == torch.int64
        assert is_context.dtype == torch.bool
        assert contexts.shape == (*is_context.shape, history)
        assert contexts.shape[:2] == (1, depth), "contexts for each position of the draft"
        first = contexts[0, 0][is_context[0, 0]]
        assert first.tolist() == [draft.recent[0, 2 - history :].tolist()], "depth 1 has one context"
        for level in range(depth):
            kept = [tuple(row) for row in contexts[0, level][is_context[0, level]].tolist()]
            assert kept, f"no context at depth {level + 1}"
            assert len(set(kept)) == len(kept), f"a context stands twice at depth {level + 1}"
