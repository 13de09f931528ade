"""The token tree: what a drafter proposes and a verifier checks in one pass."""

from collections.abc import Callable, Collection, Sequence

import attrs
import torch
from torch import Tensor


def trims(device: torch.device) -> bool:
    """Whether trees are cut to the nodes they have.

    Args:
        device: Where the tree is.

    Returns:
        True where asking how many there are is free; on a GPU it would be a transfer, and the slots that
        are left over stay, masked.
    """
    return device.type == "cpu"


def _integer_matrix(instance: "TokenTree", attribute: "attrs.Attribute[Tensor]", value: Tensor) -> None:
    if value.ndim != 2 or value.dtype != torch.int64:
        raise ValueError(
            f"TokenTree.{attribute.name} must be int64 [B, N], found {value.dtype} {list(value.shape)}"
        )


@attrs.frozen(eq=False)
class TokenTree:
    """Candidate continuations of a batch of sequences, sharing their common prefixes.

    The nodes of a row stand by falling weight, parents before children, the root first. Keeping the
    first `n` of them is therefore always a tree again, and the heaviest of its size.

    Attributes:
        token_ids: int64 `[B, N]`; the root's is the anchor, the last token chosen.
        parents: int64 `[B, N]`, index of each node's parent in its row; -1 for the root and for
            empty slots (though what an empty slot holds is never looked at).
        depths: int64 `[B, N]`, the root's is 0.
        log_weights: float32 `[B, N]`, log of the product of the draft probabilities on the path.
        num_nodes: int64 `[B]`, how many of the slots are nodes, the root included.
        max_depth: An upper bound of `depths` that is known without asking the device.
    """

    token_ids: Tensor = attrs.field(validator=_integer_matrix)
    parents: Tensor = attrs.field(validator=_integer_matrix)
    depths: Tensor = attrs.field(validator=_integer_matrix)
    log_weights: Tensor
    num_nodes: Tensor
    max_depth: int

    @classmethod
    def root_only(cls, anchor: Tensor) -> "TokenTree":
        """The tree of plain decoding.

        Args:
            anchor: int64 `[B]`.

        Returns:
            A tree of one node a row.
        """
        ids = anchor[:, None]
        return cls(
            token_ids=ids,
            parents=torch.full_like(ids, -1),
            depths=torch.zeros_like(ids),
            log_weights=torch.zeros(ids.shape, dtype=torch.float32, device=ids.device),
            num_nodes=torch.ones_like(anchor),
            max_depth=0,
        )

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[int],
        parents: Sequence[int],
        log_weights: Sequence[float] | None = None,
        device: torch.device | str = "cpu",
    ) -> "TokenTree":
        """Writes down a tree of one row.

        Args:
            token_ids: A token per node, the anchor first.
            parents: A parent per node, -1 for the root.
            log_weights: A log-weight per node; 0 throughout when not given.
            device: Where the tensors go.

        Returns:
            The tree, with depths derived from the parents.

        Raises:
            ValueError: When it is no tree (see `validate`).
        """
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} names parent {parent}; a parent must come before its child")
            depths.append(0 if parent < 0 else depths[parent] + 1)
        weights = [0.0] * len(depths) if log_weights is None else list(log_weights)
        tree = cls(
            token_ids=torch.tensor([list(token_ids)], dtype=torch.int64, device=device),
            parents=torch.tensor([list(parents)], dtype=torch.int64, device=device),
            depths=torch.tensor([depths], dtype=torch.int64, device=device),
            log_weights=torch.tensor([weights], dtype=torch.float32, device=device),
            num_nodes=torch.tensor([len(depths)], dtype=torch.int64, device=device),
            max_depth=max(depths),
        )
        tree.validate()
        return tree

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.token_ids.shape[0]

    @property
    def size(self) -> int:
        """Slots of a row: nodes with the root, and the padding behind them."""
        return self.token_ids.shape[1]

    @property
    def is_node(self) -> Tensor:
        """Bool `[B, N]`: true for nodes, false for empty slots."""
        slots = torch.arange(self.size, device=self.num_nodes.device)
        return slots < self.num_nodes[:, None]

    def ancestor_mask(self) -> Tensor:
        """Which nodes see which: a node sees itself and its ancestors.

        Returns:
            bool `[B, N, N]`, true where row sees column. An empty slot sees itself alone, so that no
            attention row is empty.
        """
        rows = torch.arange(self.size, device=self.parents.device)
        mask = torch.eye(self.size, dtype=torch.bool, device=self.parents.device)
        mask = mask.expand(self.batch_size, -1, -1).clone()
        ancestor = torch.where(self.is_node & (self.parents >= 0), self.parents, rows)
        parent = ancestor
        for _ in range(self.max_depth):
            mask.scatter_(2, ancestor[:, :, None], True)
            ancestor = parent.gather(1, ancestor)
        return mask

    def first(self, count: int) -> "TokenTree":
        """Prunes to the `count` heaviest nodes.

        Args:
            count: Nodes to keep, the root included; at least 1.

        Returns:
            The optimal tree of that size among the subtrees of this one.

        Raises:
            ValueError: When `count` is below 1.
        """
        if count < 1:
            raise ValueError(f"a tree keeps at least its root; count must be >= 1, found {count}")
        pruned = attrs.evolve(
            self,
            token_ids=self.token_ids[:, :count],
            parents=self.parents[:, :count],
            depths=self.depths[:, :count],
            log_weights=self.log_weights[:, :count],
            num_nodes=self.num_nodes.clamp(max=count),
        )
        if not trims(pruned.depths.device):
            return pruned
        return attrs.evolve(pruned, max_depth=int(pruned.depths.masked_fill(~pruned.is_node, 0).max()))

    def path_to(self, node: int, row: int = 0) -> list[int]:
        """The way from the root to a node.

        Args:
            node: Index of the node.
            row: Row of the batch.

        Returns:
            Node indices, the root's first and `node` last.
        """
        parents = self.parents[row].tolist()
        path = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    def paths(self, row: int = 0) -> list[tuple[int, ...]]:
        """All root-to-node token sequences, the root left out.

        Two trees are the same exactly when these are the same sets, however their nodes are ordered.

        Args:
            row: Row of the batch.

        Returns:
            One tuple of token ids per drafted node, in node order.
        """
        tokens, parents = self.token_ids[row].tolist(), self.parents[row].tolist()
        spelled: list[tuple[int, ...]] = [()]
        for node in range(1, int(self.num_nodes[row])):
            spelled.append((*spelled[parents[node]], tokens[node]))
        return spelled[1:]

    def validate(self) -> None:
        """Checks that every row is a tree in the promised order.

        Raises:
            ValueError: Naming the first node that breaks a rule: a parent that does not come before
                its child, a depth that is not the parent's plus one, a weight above the parent's or
                above an earlier node's, or two children of one node with the same token.
        """
        for row in range(self.batch_size):
            count = int(self.num_nodes[row])
            if not 1 <= count <= self.size:
                raise ValueError(f"row {row}: num_nodes must be in 1..{self.size}, found {count}")
            tokens, parents = self.token_ids[row].tolist(), self.parents[row].tolist()
            depths, weights = self.depths[row].tolist(), self.log_weights[row].tolist()
            if parents[0] != -1 or depths[0] != 0:
                raise ValueError(f"row {row}: node 0 must be the root, found parent {parents[0]}")
            seen: set[tuple[int, int]] = set()
            for node in range(1, count):
                parent = parents[node]
                where = f"row {row}, node {node}"
                if not 0 <= parent < node:
                    raise ValueError(f"{where}: parent must be in 0..{node - 1}, found {parent}")
                if depths[node] != depths[parent] + 1 or depths[node] > self.max_depth:
                    raise ValueError(f"{where}: depth {depths[node]} below a node of depth {depths[parent]}")
                if weights[node] > weights[node - 1]:
                    raise ValueError(f"{where}: weight above that of the node before it")
                if (parent, tokens[node]) in seen:
                    raise ValueError(f"{where}: token {tokens[node]} stands twice under node {parent}")
                seen.add((parent, tokens[node]))

    def picture(
        self,
        spell: Callable[[int], str] = str,
        accepted: Collection[int] = (),
        row: int = 0,
    ) -> str:
        """Draws a row as text, one node a line.

        Args:
            spell: How to write a token id.
            accepted: Nodes to mark with an asterisk.
            row: Row of the batch.

        Returns:
            Lines with the tree's branches, each node's token and, behind it, its weight.
        """
        count = int(self.num_nodes[row])
        tokens, parents = self.token_ids[row].tolist(), self.parents[row].tolist()
        weights = self.log_weights[row].exp().tolist()
        children: list[list[int]] = [[] for _ in range(count)]
        for node in range(1, count):
            children[parents[node]].append(node)
        lines: list[str] = []

        def draw(node: int, lead: str, branch: str, below: str) -> None:
            mark = "*" if node in accepted else " "
            lines.append(f"{mark} {lead}{branch}{spell(tokens[node])}  {weights[node]:.3f}")
            for child in children[node]:
                last = child == children[node][-1]
                draw(child, lead + below, "└─ " if last else "├─ ", "   " if last else "│  ")

        draw(0, "", "", "")
        return "\n".join(lines)
