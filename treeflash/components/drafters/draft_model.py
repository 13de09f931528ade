"""A smaller language model as drafter: the tree that it would write itself, level by level."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs
import torch
from attrs.validators import ge, gt, in_, min_len, optional
from torch import Tensor, nn

from treeflash.components.drafters.level_proposal import LevelProposal, ReadTree
from treeflash.components.drafters.separate_rows import SeparateRows
from treeflash.errors import CheckpointError, blamed_on
from treeflash.interfaces import BuildContext, Drafter
from treeflash.proposal import Proposal, TableProposal
from treeflash.target import HuggingFaceTarget, load_target
from treeflash.target.hugging_face import TargetState
from treeflash.target.loading import DTYPES
from treeflash.target_interface import Target
from treeflash.types import DraftHead, Limits, Transitions


@attrs.frozen
class DraftModelOptions:
    """What a recipe says of the drafter.

    Attributes:
        model: A smaller model with the target's tokenizer, named as in `[target]`.
        dtype: "auto" takes the target's.
        trust_remote_code: Run code that comes with the model, as in `[target]`.
        revision: Branch, tag or commit of a model on the hub.
        depth: Levels drafted, a pass of the model each.
        children: Likeliest tokens kept of each node.
        temperature: Divides the draft logits.
    """

    model: str
    dtype: str = attrs.field(default="auto", validator=in_(("auto", *DTYPES)))
    trust_remote_code: bool = False
    revision: str | None = attrs.field(default=None, validator=optional(min_len(1)))
    depth: int = attrs.field(default=5, validator=ge(1))
    children: int = attrs.field(default=8, validator=ge(1))
    temperature: float = attrs.field(default=1.0, validator=gt(0))


@attrs.define(eq=False)
class DraftModelRow:
    """What the drafter remembers of a sequence.

    Attributes:
        capacity: Positions the sequence can grow to.
        unread: int64 `[1, n]`: known tokens that the model has not read.
        reading: The model's own state; there is none before the first draft, whose limits say how many
            rows a tree takes.
        drafted: What it read of the last draft, as long as nothing has been decoded since.
    """

    capacity: int
    unread: Tensor
    reading: TargetState | None = None
    drafted: ReadTree | None = None

    @property
    def num_read(self) -> int:
        """Known tokens that the model has read."""
        return 0 if self.reading is None else self.reading.cache.length


@attrs.define(eq=False)
class DraftModelState:
    """What the drafter remembers of its sequences, which the model reads one at a time.

    Attributes:
        rows: Of each.
    """

    rows: list[DraftModelRow]


@attrs.define(eq=False)
class DraftModel(Drafter):
    """Drafts with a smaller causal language model that has the target's tokenizer.

    It reads each token once: what was decoded without having been drafted, together with the anchor, when
    a draft is asked for; then, level by level, the nodes that the selector goes on from. Of those, the
    ones that are accepted stay in its cache.

    Source: drafting with a smaller model is speculative decoding's first form (Leviathan et al. 2022,
    arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318); a tree of its likeliest tokens, verified in one
    pass, SpecInfer's (Miao et al. 2023, arXiv:2305.09781).

    Attributes:
        model: The smaller model, on the target's device.
        depth: Levels drafted, a pass of the model each.
        children: Likeliest tokens kept of each node.
        temperature: Divides the draft logits.
    """

    Options: ClassVar[type | None] = DraftModelOptions

    model: HuggingFaceTarget
    depth: int = 5
    children: int = 8
    temperature: float = 1.0
    _vocab_size: int = attrs.field(default=0, init=False)
    # The text of the target compared with last: comparing vocabularies takes a moment.
    _compared: Any = attrs.field(default=None, init=False)

    drafts_blocks = False

    @classmethod
    def from_options(cls, options: DraftModelOptions, context: BuildContext) -> Self:
        """Loads the model that a recipe names."""
        target = context.target
        dtype = str(target.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype
        place = context.find_model(options.model)
        with blamed_on("drafter.model"):
            model = load_target(
                place,
                dtype=dtype,
                device=str(target.device),
                called="draft model",
                trust_remote_code=options.trust_remote_code,
                revision=options.revision,
            )
        return cls(model, options.depth, options.children, options.temperature)

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # an option says how many
        """Levels drafted."""
        return self.depth

    @property
    def network(self) -> nn.Module:
        """The model's weights."""
        network: nn.Module = self.model.model
        return network

    def bind(self, target: Target) -> None:
        """Compares the two vocabularies."""
        text = getattr(target, "text", None)
        if text is None or text is not self._compared:
            fault = _misfit(self.model, target)
            if fault is not None:
                raise CheckpointError(f"drafter.model: {fault}")
        self._compared = text
        self._vocab_size = min(self.model.vocab_size, target.vocab_size)

    def start(self, batch_size: int, capacity: int) -> DraftModelState:
        """Makes a state that has read nothing."""
        unread = torch.empty(1, 0, dtype=torch.int64, device=self.model.device)
        return DraftModelState([DraftModelRow(capacity, unread) for _ in range(batch_size)])

    def extend(self, state: DraftModelState, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """Keeps what was accepted of the last draft, and remembers the rest for the next one."""
        for row, ids, count in zip(state.rows, torch.split(token_ids, 1), counts.tolist(), strict=True):
            new = self._readable(ids[:, :count])
            if row.drafted is not None:
                read = row.drafted.rows_of(new)
                self.model.commit(row.drafted.reading, [read])
                row.drafted, new = None, new[:, len(read) :]
            row.unread = torch.cat([row.unread, new], dim=1)

    def rewind(self, state: DraftModelState, lengths: Tensor) -> None:
        """Forgets tokens, read or not."""
        for row, length in zip(state.rows, torch.split(lengths, 1), strict=True):
            row.unread = row.unread[:, : max(0, int(length) - row.num_read)]
            row.drafted = None
            if row.reading is not None:
                self.model.rewind(row.reading, length)

    def propose(self, state: DraftModelState, recent: Tensor, limits: Limits) -> Proposal:
        """Reads what is new up to the anchor; the levels below it when they are asked for."""
        assert self._vocab_size, "bind comes first"
        anchors = torch.split(recent[:, 1], 1)
        drafts = [self._draft(row, anchor, limits) for row, anchor in zip(state.rows, anchors, strict=True)]
        return drafts[0] if len(drafts) == 1 else SeparateRows(drafts)

    def _draft(self, state: DraftModelRow, anchor: Tensor, limits: Limits) -> Proposal:
        """Drafts for one row, whose anchor is int64 `[1]`."""
        position = state.num_read + state.unread.shape[1]
        if state.reading is None:
            # The levels below the first are read, and each has as many nodes as a tree at most.
            rows = state.capacity + 1 + (self.depth - 1) * limits.nodes
            state.reading = self.model.start(1, rows, ())
        reading = state.reading
        room = reading.cache.extent.capacity - position - 1
        levels = min(self.depth, limits.depth, 1 + room // limits.nodes)
        if self.model.max_positions is not None:
            levels = min(levels, self.model.max_positions - position)
        if levels < 1:
            return _nothing(anchor)
        readable = self._readable(anchor)
        output = self.model.prefill(reading, torch.cat([state.unread, readable[:, None]], dim=1))
        # The anchor is the root of what follows, and not the text's before it is verified.
        self.model.rewind(reading, torch.full_like(reading.cache.extent.lengths, position))
        state.unread = state.unread[:, :0]
        state.drafted = ReadTree.of_anchor(self.model, reading, readable)
        # The model's own forward gives the logits, whatever its family does to them.
        head = DraftHead(
            embed=self.model.embed,
            norm=lambda hidden: hidden,
            project=lambda logits: logits,
            vocab_size=self._vocab_size,
            temperature=self.temperature,
        )
        # A tree of n nodes takes none but the n likeliest children of a node.
        width = min(self.children, limits.nodes)
        return LevelProposal(anchor, levels, state.drafted, output.logits, head, width)

    def _readable(self, token_ids: Tensor) -> Tensor:
        """Any token in place of one that only the target's padded vocabulary has."""
        return token_ids.clamp(max=self.model.vocab_size - 1)


def _nothing(anchor: Tensor) -> TableProposal:
    """A draft without a level."""
    ids = anchor.new_zeros(anchor.shape[0], 0, 1, 1)
    return TableProposal(anchor, Transitions(ids, ids.float(), ids))


def _misfit(model: HuggingFaceTarget, target: Target) -> str | None:
    """Why a model cannot draft for a target; None when it can."""
    if model.device != target.device:
        return f"expected it on the target's device {target.device}, found it on {model.device}"
    text = getattr(target, "text", None)
    if model.text is not None and text is not None:
        return _other_tokens(model.text.tokenizer.get_vocab(), text.tokenizer.get_vocab())
    if model.vocab_size != target.vocab_size:
        return (
            f"expected the target's vocabulary of {target.vocab_size} tokens, found {model.vocab_size} "
            "(without a tokenizer beside both models, their sizes are all there is to compare)"
        )
    return None


def _other_tokens(mine: Mapping[str, int], theirs: Mapping[str, int]) -> str | None:
    """Whether an id means one token here and another there; that one side has more is harmless."""
    tokens = {number: token for token, number in mine.items()}
    others = [(number, token) for token, number in theirs.items() if tokens.get(number, token) != token]
    if not others:
        return None
    number, token = min(others)
    return (
        f"expected the target's tokenizer, found another: {len(others)} of the target's {len(theirs)} tokens "
        f"are others here, the first is {number}: {token!r} there, {tokens[number]!r} here"
    )
