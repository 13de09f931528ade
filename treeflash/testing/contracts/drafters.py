"""What the engine expects of a drafter."""

from collections.abc import Sequence
from typing import Any

import torch

from treeflash.components.builders.marginal import Marginal
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import InputError
from treeflash.interfaces import Drafter
from treeflash.proposal import Proposal
from treeflash.target import HuggingFaceTarget
from treeflash.testing.contracts.contract import (
    PROMPTS,
    Contract,
    check_lossless,
    check_options,
    read,
    trees_of,
)
from treeflash.types import BlockDraft, Limits

_ROOM = 128
_ROUNDING = 1e-3  # of a log-weight
_TEXT = [*PROMPTS[0], *b" buys 2 apples, so now Ana has 9 apples. Ana"]
_OTHER = [2, *b"Ben has 12 coins. Ben loses 3 coins, so now Ben has 9 coins. Ben"]


class DrafterContract(Contract):
    """Subclass it and say how the drafter is made."""

    def make(self, target: HuggingFaceTarget) -> Drafter:
        """Makes the drafter, not bound yet.

        Args:
            target: Whom it drafts for.
        """
        raise NotImplementedError

    def test_it_can_be_configured(self) -> None:
        """Options are an attrs class, and it is documented."""
        check_options(self.make(self.target()))

    def test_it_says_what_it_reads_and_how_deep_it_drafts(self) -> None:
        """`tap_layers` are layers of the target, `max_depth` is a number."""
        target, drafter = self._bound()
        assert isinstance(drafter.max_depth, int)
        assert drafter.max_depth >= 0
        assert all(0 <= layer < target.num_layers for layer in drafter.tap_layers)

    @torch.inference_mode()
    def test_it_drafts_in_the_shapes_it_should(self) -> None:
        """A block draft or a proposal, no deeper than asked for."""
        target, drafter = self._bound()
        for depth in range(1, drafter.max_depth + 1):
            draft = self._propose(target, drafter, self._fed(target, drafter, _TEXT), _TEXT, depth)
            assert draft.depth <= depth, f"asked for {depth} levels"
            if isinstance(draft, BlockDraft):
                assert type(drafter).drafts_blocks, "a block draft, of a drafter whose drafts_blocks is false"
                shape = (1, draft.depth, draft.hidden.shape[-1])
                assert draft.hidden.shape == draft.normed.shape == shape
                ids, log_probs = draft.head.top_k(draft.normed, 4)
                assert ids.dtype == torch.int64
                assert log_probs.dtype == torch.float32
                assert ids.shape == log_probs.shape == (1, draft.depth, 4)
                assert bool((ids < target.vocab_size).all())
                assert bool((log_probs.diff(dim=-1) <= 0).all()), "the likeliest tokens come first"
            else:
                assert isinstance(draft, Proposal)
                assert not type(drafter).drafts_blocks, "a proposal, of a drafter whose drafts_blocks is true"
                self._explore(target, draft)

    @torch.inference_mode()
    def test_drafting_leaves_the_state_as_it_is(self) -> None:
        """Drafting twice gives the same."""
        target, drafter = self._bound()
        if drafter.max_depth:
            state = self._fed(target, drafter, _TEXT)
            first, second = (self._tree(target, drafter, state, _TEXT) for _ in range(2))
            self._same(first, second)

    @torch.inference_mode()
    def test_a_text_may_come_in_pieces(self) -> None:
        """As a prompt and then step by step, it leaves the same state as all at once."""
        target, drafter = self._bound()
        if drafter.max_depth:
            state = self._fed(target, drafter, _TEXT[:20])
            # It knows 19 tokens; the 20th is the anchor.
            for start in range(19, len(_TEXT) - 1, 3):
                self._extend(target, drafter, state, _TEXT, start, min(start + 3, len(_TEXT) - 1))
            whole = self._fed(target, drafter, _TEXT)
            self._same(self._tree(target, drafter, state, _TEXT), self._tree(target, drafter, whole, _TEXT))

    @torch.inference_mode()
    def test_what_is_rewound_is_forgotten(self) -> None:
        """Behind a rewind it drafts as if the rest had never been."""
        target, drafter = self._bound()
        if drafter.max_depth:
            other = [*_TEXT[:25], *b" finds 3 pens. Ben"]
            state = self._fed(target, drafter, other)
            drafter.rewind(state, torch.tensor([25]))
            self._extend(target, drafter, state, _TEXT, 25, len(_TEXT) - 1)
            fresh = self._fed(target, drafter, _TEXT)
            self._same(self._tree(target, drafter, state, _TEXT), self._tree(target, drafter, fresh, _TEXT))

    @torch.inference_mode()
    def test_sequences_do_not_know_each_other(self) -> None:
        """Two states of one drafter are apart."""
        target, drafter = self._bound()
        if drafter.max_depth:
            mine = self._fed(target, drafter, _TEXT)
            before = self._tree(target, drafter, mine, _TEXT)
            self._fed(target, drafter, [2, *b"Ben has 3 coins. Ben loses 1"])
            self._same(before, self._tree(target, drafter, mine, _TEXT))

    @torch.inference_mode()
    def test_rows_of_a_batch_may_differ_in_length(self) -> None:
        """Each drafts as it would alone; a drafter that cannot raises an `InputError` when it starts."""
        target, drafter = self._bound()
        if not drafter.max_depth:
            return
        texts = (_TEXT, _OTHER)
        try:
            state = drafter.start(len(texts), _ROOM)
        except InputError:
            return
        begins = [0, 0]
        for counts in ([12, 20], [3, 5], [6, 1]):
            ends = [begin + count for begin, count in zip(begins, counts, strict=True)]
            self._extend_rows(target, drafter, state, texts, begins, ends)
            self._same_as_alone(target, drafter, state, texts, ends)
            begins = ends
        ends = [begins[0] - 2, begins[1] - 7]
        drafter.rewind(state, torch.tensor(ends))
        self._same_as_alone(target, drafter, state, texts, ends)

    def test_the_text_is_the_targets_own(self) -> None:
        """Whatever it drafts."""
        target = self.target()
        drafter = self.make(target)
        parts: dict[str, Any] = {}
        if type(drafter).drafts_blocks:
            parts = {"builder": Marginal(), "refiner": NoRefiner()}
        check_lossless(Decoder(target, drafter, selector=OptTree(7), **parts))

    def _bound(self) -> tuple[HuggingFaceTarget, Drafter]:
        target = self.target()
        drafter = self.make(target)
        drafter.bind(target)
        return target, drafter

    def _fed(self, target: HuggingFaceTarget, drafter: Drafter, text: Sequence[int]) -> Any:
        """A state that knows a text up to its last token, the anchor."""
        state = drafter.start(1, _ROOM)
        self._extend(target, drafter, state, text, 0, len(text) - 1)
        return state

    def _extend(
        self,
        target: HuggingFaceTarget,
        drafter: Drafter,
        state: Any,
        text: Sequence[int],
        begin: int,
        end: int,
    ) -> None:
        taps = read(target, text[:end], drafter.tap_layers) if drafter.tap_layers else None
        ids = torch.tensor([list(text[begin:end])], device=target.device)
        piece = None if taps is None else taps[:, begin:end]
        drafter.extend(state, ids, piece, torch.tensor([end - begin]))

    def _extend_rows(
        self,
        target: HuggingFaceTarget,
        drafter: Drafter,
        state: Any,
        texts: Sequence[Sequence[int]],
        begins: Sequence[int],
        ends: Sequence[int],
    ) -> None:
        """Extends all rows at once; behind the shorter ones is something else."""
        counts = torch.tensor([end - begin for begin, end in zip(begins, ends, strict=True)])
        ids = torch.full((len(texts), int(counts.max())), 7, dtype=torch.int64, device=target.device)
        taps = None
        for row, (text, begin, end) in enumerate(zip(texts, begins, ends, strict=True)):
            ids[row, : end - begin] = torch.tensor(list(text[begin:end]))
            if drafter.tap_layers:
                read_ = read(target, text[:end], drafter.tap_layers)
                assert read_ is not None
                if taps is None:
                    taps = read_.new_full((*ids.shape, read_.shape[-1]), 3.0)
                taps[row, : end - begin] = read_[0, begin:end]
        drafter.extend(state, ids, taps, counts)

    def _same_as_alone(
        self,
        target: HuggingFaceTarget,
        drafter: Drafter,
        state: Any,
        texts: Sequence[Sequence[int]],
        ends: Sequence[int],
    ) -> None:
        """Drafts for all rows, and for each by itself; row r knows its text up to `ends[r]`."""
        heads = [list(text[: end + 1]) for text, end in zip(texts, ends, strict=True)]
        recent = torch.tensor([head[-2:] for head in heads], device=target.device)
        limits = Limits(8, drafter.max_depth)
        try:
            together = trees_of(drafter.propose(state, recent, limits), limits)
        except (IndexError, RuntimeError) as error:
            raise AssertionError(
                f"its draft for {len(texts)} rows cannot be explored; if it drafts for one alone, `start` "
                "has to raise an InputError for more"
            ) from error
        for found, head in zip(together, heads, strict=True):
            alone = self._fed(target, drafter, head)
            self._same(found, self._tree(target, drafter, alone, head))

    def _propose(
        self, target: HuggingFaceTarget, drafter: Drafter, state: Any, text: Sequence[int], depth: int
    ) -> BlockDraft | Proposal:
        recent = torch.tensor([list(text[-2:])], device=target.device)
        return drafter.propose(state, recent, Limits(8, depth))

    def _tree(
        self, target: HuggingFaceTarget, drafter: Drafter, state: Any, text: Sequence[int]
    ) -> tuple[list[tuple[int, ...]], list[float]]:
        draft = self._propose(target, drafter, state, text, drafter.max_depth)
        (tree,) = trees_of(draft, Limits(8, drafter.max_depth))
        return tree

    def _same(
        self, one: tuple[list[tuple[int, ...]], list[float]], other: tuple[list[tuple[int, ...]], list[float]]
    ) -> None:
        mine, theirs = (dict(zip(*pair, strict=True)) for pair in (one, other))
        for these, those in ((mine, theirs), (theirs, mine)):
            least = min(those.values(), default=0.0)
            for path, weight in these.items():
                # Rounding may exchange nodes that weigh as much as the least.
                assert abs(those.get(path, least) - weight) < _ROUNDING, f"another tree, at {path}"

    def _explore(self, target: HuggingFaceTarget, proposal: Proposal) -> None:
        handles = proposal.root()
        assert handles.shape == (1, 1)
        assert handles.dtype == torch.int64
        for depth in range(1, proposal.depth + 1):
            children = proposal.children(depth, handles)
            shape = children.token_ids.shape
            assert shape[:2] == handles.shape, "children of every handle asked for"
            assert children.log_probs.shape == children.handles.shape == shape
            assert children.token_ids.dtype == children.handles.dtype == torch.int64
            assert children.log_probs.dtype == torch.float32
            real = children.log_probs > -torch.inf
            assert bool((children.token_ids[real] < target.vocab_size).all())
            assert bool((children.token_ids[real] >= 0).all())
            for ids, there in zip(children.token_ids.flatten(0, 1), real.flatten(0, 1), strict=True):
                kept = ids[there].tolist()
                assert len(set(kept)) == len(kept), "a token stands twice under one node"
            total = children.log_probs.exp().sum(dim=-1)
            assert bool((total <= 1 + 1e-4).all()), "children's probabilities add up to more than 1"
            below = children.handles.masked_fill(~real, -1).flatten(1)
            handles = below[:, (below >= 0)[0]][:, :4]
            if handles.shape[1] == 0:
                break
