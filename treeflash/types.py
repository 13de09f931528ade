"""What flows from part to part in one step of decoding, the batch axis first throughout."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import attrs
import torch
from torch import Tensor

from treeflash.tree import TokenTree


@attrs.frozen
class Limits:
    """How much of a draft a step can use at most.

    Attributes:
        nodes: Draft nodes, the root excluded.
        depth: Levels below the root.
        length: Positions that the target has read, of the longest sequence; the root's position.
    """

    nodes: int
    depth: int
    length: int = 0

    @property
    def allow_drafting(self) -> bool:
        """Whether a draft can hold any node at all."""
        return self.nodes > 0 and self.depth > 0


@attrs.define(eq=False)
class DecodeState:
    """A batch of sequences in the middle of decoding.

    Components hold weights only; what belongs to a sequence is here, so that sequences can be forked,
    rewound and batched.

    Attributes:
        recent: int64 `[B, 2]`: the token before the anchor, and the anchor: the last token chosen,
            not yet seen by the target.
        lengths: int64 `[B]` on the CPU: positions in the target's cache. The anchor's position.
        target: The target's own state.
        drafter: The drafter's own state.
    """

    recent: Tensor
    lengths: Tensor
    target: Any
    drafter: Any

    @property
    def anchor(self) -> Tensor:
        """Int64 `[B]`."""
        return self.recent[:, 1]


@attrs.frozen(eq=False)
class TargetOutput:
    """What one pass of the target gives.

    Attributes:
        logits: `[B, n, V]` in the target's dtype.
        taps: `[B, n, F]` in the target's dtype: the outputs of the tapped layers side by side, or
            None when nothing is tapped.
    """

    logits: Tensor
    taps: Tensor | None


def wide_top_k(values: Tensor, k: int, block: int = 64) -> tuple[Tensor, Tensor]:
    """The k greatest of very many values a row, in two passes.

    The k greatest lie in the k blocks with the greatest maxima. Finding maxima is one cheap pass over
    the row, and the search proper sees only those blocks.

    Args:
        values: `[..., V]`, contiguous.
        k: How many, at most V.
        block: Values a block.

    Returns:
        As `Tensor.topk` along the last dimension: values by falling size, and their indices.
    """
    width = values.shape[-1]
    if width % block or width < 64 * block or k * block > width // 4 or not values.is_contiguous():
        best, index = values.topk(k, dim=-1)
        return best, index
    blocks = values.view(*values.shape[:-1], width // block, block)
    chosen = blocks.amax(dim=-1).topk(k, dim=-1).indices
    inside = blocks.gather(-2, chosen[..., None].expand(*chosen.shape, block)).flatten(-2)
    best, index = inside.topk(k, dim=-1)
    return best, chosen.gather(-1, index // block) * block + index % block


@attrs.frozen(eq=False)
class DraftHead:
    """From token ids to embeddings, and from hidden states to likely tokens, as the drafter sees them.

    Attributes:
        embed: int64 `[...]` to `[..., D]`.
        norm: The drafter's final norm, `[..., D]` to `[..., D]`.
        project: Normed hidden states `[..., D]` to logits `[..., V']`.
        vocab_size: Tokens that may be drafted: ids from 0 up to it. Logits past it (padding of the
            head) are ignored.
        temperature: Divides the logits.
        chunk: Rows projected at once. A logit row is as wide as the vocabulary, so that all rows of a
            large lattice at once would be written to fresh memory and read back from there; too few
            leave the matrix product with little to do.
        columns: int64 `[V']`, ascending: the tokens that are scored, when that is not all of them.
        rows: int64 `[...]` of tokens to the weights `[..., D]` that `project` multiplies by for each, and
            their biases `[...]` or None; None where it is no linear map.
    """

    embed: Callable[[Tensor], Tensor]
    norm: Callable[[Tensor], Tensor]
    project: Callable[[Tensor], Tensor]
    vocab_size: int
    temperature: float = 1.0
    chunk: int = 32
    columns: Tensor | None = None
    rows: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None

    @property
    def width(self) -> int:
        """Tokens that are scored, V'."""
        return self.vocab_size if self.columns is None else len(self.columns)

    def tokens(self, index: Tensor) -> Tensor:
        """The tokens that belong to columns of the logits, int64 of any shape."""
        return index if self.columns is None else self.columns[index]

    def index(self, token_ids: Tensor) -> Tensor:
        """Columns of the logits that belong to tokens among those scored, int64 of any shape."""
        return token_ids if self.columns is None else torch.searchsorted(self.columns, token_ids)

    def logits(self, normed: Tensor) -> Tensor:
        """Draft logits.

        Args:
            normed: Hidden states behind the final norm, `[..., D]`.

        Returns:
            float32 `[..., V']`, divided by the temperature.
        """
        logits = self.project(normed)[..., : self.width].float()
        return logits if self.temperature == 1 else logits / self.temperature

    def top_k(self, normed: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens and their log-probabilities.

        Args:
            normed: Hidden states behind the final norm, `[..., D]`.
            k: How many; more than are scored gives all of these.

        Returns:
            `ids` int64 `[..., k]` by falling probability, and `log_probs` float32 `[..., k]`.
        """
        k = min(k, self.width)
        rows = normed.reshape(-1, normed.shape[-1])
        step = self.chunk if rows.device.type == "cpu" else max(1, rows.shape[0])
        ids, log_probs = [], []
        for start in range(0, rows.shape[0], step):
            logits = self.logits(rows[start : start + step])
            top, index = wide_top_k(logits, k)
            # Only k log-probabilities are needed: the normaliser is one number a row.
            ids.append(self.tokens(index))
            log_probs.append(top - torch.logsumexp(logits, dim=-1, keepdim=True))
        shape = (*normed.shape[:-1], k)
        return torch.cat(ids).view(shape), torch.cat(log_probs).view(shape)


@attrs.frozen(eq=False)
class BlockDraft:
    """A one-shot draft: a hidden state for each of the next `P` positions.

    Attributes:
        recent: int64 `[B, 2]`, as in `DecodeState`.
        hidden: `[B, P, D]`, before the drafter's final norm.
        normed: `[B, P, D]`, behind it.
        head: What turns them into tokens.
    """

    recent: Tensor
    hidden: Tensor
    normed: Tensor
    head: DraftHead
    _top: dict[int, tuple[Tensor, Tensor]] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def depth(self) -> int:
        """Positions drafted, P."""
        return self.hidden.shape[1]

    @cached_property
    def _marginals(self) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(self.normed)
        return logits, torch.logsumexp(logits, dim=-1, keepdim=True)

    def top_k(self, k: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of every position by the backbone's own distribution.

        Computed once, whoever asks: where a tree grows level by level, each level does.

        Args:
            k: How many; more than are scored gives all of these.

        Returns:
            `ids` int64 and `log_probs` float32, `[B, P, k]`, by falling probability.
        """
        if k not in self._top:
            logits, total = self._marginals
            top, index = wide_top_k(logits, min(k, logits.shape[-1]))
            self._top[k] = self.head.tokens(index), top - total
        return self._top[k]

    def log_mass_outside(self, ids: Tensor) -> Tensor:
        """What the backbone's own distributions leave for other tokens.

        Args:
            ids: int64 `[B, P, k]`, distinct in a position, from `top_k`.

        Returns:
            float32 `[B, P, 1]`, log of the probability of all tokens but these; summed over the
            others, since one minus a sum is rounding noise where little is left.
        """
        logits, total = self._marginals
        return (
            torch.logsumexp(logits.scatter(-1, self.head.index(ids), -torch.inf), dim=-1, keepdim=True)
            - total
        )


@attrs.frozen(eq=False)
class Lattice:
    """Stage 1: the contexts worth asking a refiner about, laid out before it is asked.

    Attributes:
        contexts: int64 `[B, P, C, H]`: at each depth, the last H tokens before it. At depth 1 there
            is one, of tokens already decoded; where a depth has fewer than C, the rest repeats it.
        is_context: bool `[B, P, C]`, false for those repetitions.
        children: Children to keep per context, K.
    """

    contexts: Tensor
    is_context: Tensor
    children: int


@attrs.frozen
class OnDemand:
    """Stage 1 of the frontier form: no context is laid out, the selector asks as it goes.

    Attributes:
        children: Children to keep per context, K.
    """

    children: int


@attrs.frozen(eq=False)
class Transitions:
    """Stage 2: the best children of every context, refined in one pass.

    Attributes:
        token_ids: int64 `[B, P, C, K]`.
        log_probs: float32 `[B, P, C, K]`, falling along K.
        next_context: int64 `[B, P, C, K]`: the child's own context at the next depth, -1 when it has
            none there (it can be chosen, but only as a leaf).
    """

    token_ids: Tensor
    log_probs: Tensor
    next_context: Tensor


@attrs.frozen
class TreeFigures:
    """What an `Acceptance` says of a batch of trees, a value a row.

    Attributes:
        num_drafted: Draft nodes, the root excluded.
        depths: Depth of the deepest.
        expected: Draft tokens that the weights promise: the sum of the draft nodes'.
    """

    num_drafted: list[int]
    depths: list[int]
    expected: list[float]

    @classmethod
    def of(cls, tree: TokenTree) -> "TreeFigures":
        """Reads them off trees, in one transfer from the device.

        Args:
            tree: The trees.
        """
        drafted = tree.is_node & (tree.depths > 0)
        weights = tree.log_weights.double().exp().masked_fill(~drafted, 0).sum(dim=1)
        deepest = tree.depths.masked_fill(~drafted, 0).amax(dim=1)
        rows = torch.stack([drafted.sum(dim=1), deepest, weights], dim=1).tolist()
        return cls([int(row[0]) for row in rows], [int(row[1]) for row in rows], [row[2] for row in rows])


@attrs.frozen(eq=False)
class Acceptance:
    """What the target made of a tree.

    Attributes:
        paths: For each row the accepted nodes from the root down, the root included.
        tokens: For each row the tokens the target chose: those of the accepted draft nodes, then the
            bonus token.
        num_drafted: Draft nodes each row's tree had.
        depths: Depth of the deepest of them.
        taps: `[B, A, F]`: tapped states of the accepted path (a row is as long as its path; with more
            than one row, as the longest), or None.
        expected: For each row the draft tokens that its tree's weights promise, the sum of the nodes'; None
            when the verifier does not say.
    """

    paths: list[list[int]]
    tokens: list[list[int]]
    num_drafted: list[int]
    depths: list[int]
    taps: Tensor | None
    expected: list[float] | None = None

    @classmethod
    def of(
        cls,
        tree: TokenTree,
        paths: list[list[int]],
        tokens: list[list[int]],
        output: TargetOutput,
        figures: TreeFigures | None = None,
    ) -> "Acceptance":
        """Makes it from what a verifier decided: gathers the states of the paths, and the trees' figures.

        Args:
            tree: The trees.
            paths: For each row the accepted nodes from the root down, the root included.
            tokens: For each row as many tokens: those of the accepted draft nodes, then the bonus token.
            output: Of the target's pass over the trees.
            figures: Of the trees, for a verifier that has them on the host already; read off them when not
                given.

        Returns:
            The acceptance.
        """
        figures = TreeFigures.of(tree) if figures is None else figures
        taps = _along(output.taps, paths)
        return cls(paths, tokens, figures.num_drafted, figures.depths, taps, figures.expected)

    @property
    def num_accepted(self) -> list[int]:
        """Draft tokens accepted in each row, the bonus token excluded."""
        return [len(path) - 1 for path in self.paths]


def _along(taps: Tensor | None, paths: list[list[int]]) -> Tensor | None:
    """The rows of some paths, `[B, A, F]` of `[B, N, F]`."""
    if taps is None:
        return None
    longest = max(map(len, paths))
    rows = [path + [0] * (longest - len(path)) for path in paths]
    if rows == [list(range(longest))] * len(rows):
        return taps[:, :longest]
    index = torch.tensor(rows).to(taps.device, non_blocking=True)
    return taps.gather(1, index[:, :, None].expand(-1, -1, taps.shape[-1]))
