"""A draft that a causal language model writes level by level, reading each node once."""

from collections.abc import Sequence
from typing import Self

import attrs
import torch
from torch import Tensor

from treeflash.proposal import TOKEN_BITS, Children, Proposal
from treeflash.target import HuggingFaceTarget
from treeflash.target.hugging_face import TargetState
from treeflash.tree import TokenTree
from treeflash.types import DraftHead


@attrs.define(eq=False)
class ReadTree:
    """The nodes of a draft that have been read so far.

    Their keys and values lie behind the committed rows, a row a node. When the target accepts some of
    them these rows become the text's, and nothing is read again; but for nodes that were read beside one
    whose states overflow, which no mask keeps from them.

    Attributes:
        model: What reads them.
        reading: Its state.
        tree: The nodes in the order of their rows, level by level, the anchor first. Weights are not
            kept. A node that stands for none has no parent, though it is not the root.
        finite: bool `[1, N]`: which of the nodes have finite logits.
    """

    model: HuggingFaceTarget
    reading: TargetState
    tree: TokenTree
    finite: Tensor

    @classmethod
    def of_anchor(cls, model: HuggingFaceTarget, reading: TargetState, anchor: Tensor) -> Self:
        """The anchor, int64 `[1]`, has been read; behind the text, with nothing beside it."""
        return cls(model, reading, TokenTree.root_only(anchor), anchor.new_ones(1, 1, dtype=torch.bool))

    def deepen(self, parents: Tensor, token_ids: Tensor) -> Tensor:
        """Reads one more level.

        Args:
            parents: int64 `[B, F]`: the nodes' parents, on the level above; -1 for a node that is none.
            token_ids: int64 `[B, F]`.

        Returns:
            Logits behind the new nodes, `[B, F, V]`, in the model's dtype.
        """
        upper = self.tree
        level = upper.max_depth + 1
        self.tree = TokenTree(
            token_ids=torch.cat([upper.token_ids, token_ids], dim=1),
            parents=torch.cat([upper.parents, parents], dim=1),
            depths=torch.cat([upper.depths, torch.full_like(token_ids, level)], dim=1),
            log_weights=torch.cat([upper.log_weights, upper.log_weights.new_zeros(token_ids.shape)], dim=1),
            num_nodes=upper.num_nodes + token_ids.shape[1],
            max_depth=level,
        )
        return self.model.verify(self.reading, self.tree, first=upper.size).logits

    def rows_of(self, token_ids: Tensor) -> Sequence[int]:
        """Finds a text among the nodes.

        Args:
            token_ids: int64 `[1, n]`, from the anchor on.

        Returns:
            The nodes that spell its beginning, as far as there are any that were read well.
        """
        parts = token_ids[0], self.tree.token_ids[0], self.tree.parents[0], self.finite[0].long()
        # One small transfer: reading the tokens again would take a pass over more rows.
        host = torch.cat(parts).tolist()
        text, count = host[: len(parts[0])], self.tree.size
        tokens, parents, finite = (host[len(text) + count * part :][:count] for part in range(3))
        child = {
            (parent, token): node
            for node, (parent, token, sound) in enumerate(zip(parents, tokens, finite, strict=True))
            if (parent >= 0 or node == 0) and sound
        }
        rows: list[int] = []
        for token in text:
            node = child.get((rows[-1] if rows else -1, token))
            if node is None:
                break
            rows.append(node)
        return rows


@attrs.frozen(eq=False)
class LevelProposal(Proposal):
    """Asks the model about the nodes that are reached, a pass a level.

    A handle is a node that has not been read yet: its parent's row and its token.

    Attributes:
        anchor: int64 `[B]`.
        depth: Levels that can be asked for.
        read: The nodes read; the anchor has been.
        logits: `[B, 1, V]` behind the anchor.
        head: Makes tokens of logits.
        width: Children of a node.
    """

    anchor: Tensor
    depth: int
    read: ReadTree
    logits: Tensor
    head: DraftHead
    width: int

    def root(self) -> Tensor:
        """The anchor, which has been read."""
        return torch.zeros_like(self.anchor)[:, None]

    def children(self, depth: int, handles: Tensor) -> Children:
        """Reads the nodes, but for the anchor, and takes the likeliest tokens behind each."""
        logits = self.logits if depth == 1 else self._read(handles)
        token_ids, log_probs = self.head.top_k(logits, self.width)
        if depth > 1:
            # One NaN among the logits makes all log-probabilities NaN.
            self.read.finite = torch.cat([self.read.finite, log_probs[..., 0].isfinite()], dim=1)
        size, count = self.read.tree.size, handles.shape[1]
        rows = torch.arange(size - count, size, device=handles.device)[None, :, None]
        below = rows << TOKEN_BITS | token_ids if depth < self.depth else torch.full_like(token_ids, -1)
        return Children(token_ids, log_probs, below)

    def _read(self, handles: Tensor) -> Tensor:
        parents = handles >> TOKEN_BITS  # of -1 as well: -1
        token_ids = handles & ((1 << TOKEN_BITS) - 1)
        # Any token would do for a node that is none, if its states are finite.
        token_ids = torch.where(handles < 0, self.read.tree.token_ids[:, :1], token_ids)
        return self.read.deepen(parents, token_ids)
