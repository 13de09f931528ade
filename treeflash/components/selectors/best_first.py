"""The heaviest nodes of a draft that is known beforehand, taken one by one from a heap on the host.

A level of a tree is some twenty operations on tensors, most of whose time, on a CPU, goes into calling
them. A node of the heap is a handful of operations on numbers.
"""

from ctypes import c_float
from functools import cache
from heapq import heappop, heappush
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treeflash.proposal import usable
from treeflash.tree import TokenTree
from treeflash.types import Transitions

# What stands in a slot behind a row's nodes: token, parent, depth, weight.
_EMPTY = (0, -1, 0, -inf)
# Children of a context: log-probabilities, tokens, and what comes below them.
_Siblings = tuple[list[float], list[int], list[int]]
# A tree as it grows: its nodes' tokens, parents, depths and weights.
_Columns = tuple[list[int], list[int], list[int], list[float]]


def heaviest(anchor: Tensor, table: Transitions, nodes: int, depth: int) -> TokenTree | None:
    """Takes the heaviest nodes of each row, heaviest first.

    Args:
        anchor: int64 `[B]`, on a CPU.
        table: All that is drafted.
        nodes: Nodes to take at most, the root excluded.
        depth: Levels to look at, no more than the table has.

    Returns:
        The very tree that comes of exploring level by level. None where children do not stand by falling
        probability, as they should: only then is a child no heavier than the sibling before it; or in another
        dtype than they should.

    Source: OPT-Tree (Wang et al. 2024, arXiv:2406.17276), which takes its nodes from a heap.
    """
    if table.log_probs.dtype != torch.float32:
        return None
    log_probs = usable(table.log_probs).detach().numpy()
    if not (log_probs[..., 1:] <= log_probs[..., :-1]).all():
        return None
    token_ids, following = table.token_ids.numpy(), table.next_context.numpy()
    rows = [
        _grow(root, log_probs[row], token_ids[row], following[row], nodes, depth)
        for row, root in enumerate(anchor.tolist())
    ]
    counts = [len(row[0]) for row in rows]
    tokens, parents, depths, weights = (
        [values + [empty] * (max(counts) - len(values)) for values in column]
        for column, empty in zip(zip(*rows, strict=True), _EMPTY, strict=True)
    )
    return TokenTree(
        token_ids=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        log_weights=torch.tensor(weights, dtype=torch.float32),
        num_nodes=torch.tensor(counts),
        max_depth=max(max(row[2]) for row in rows),
    )


def _grow(
    anchor: int,
    log_probs: "np.ndarray[Any, Any]",
    token_ids: "np.ndarray[Any, Any]",
    following: "np.ndarray[Any, Any]",
    nodes: int,
    depth: int,
) -> _Columns:
    """One row's tree, from its part of the table, `[P, C, K]` each."""
    tokens, parents, depths, weights = [anchor], [-1], [0], [0.0]
    # Fallen weight, depth, parent, number among its siblings, and the siblings. Parents are numbered as they
    # were taken, so that equals come out in the order in which the levels, explored in turn, give them: by
    # depth, then by their parents' order, then by their own. No comparison gets as far as the siblings.
    heap: list[tuple[float, int, int, int, _Siblings]] = []
    single = c_float()

    @cache
    def children(level: int, context: int) -> _Siblings:
        # Few contexts of a table are reached by a small tree, and some of them often.
        place = level - 1, context
        return log_probs[place].tolist(), token_ids[place].tolist(), following[place].tolist()

    def offer(level: int, parent: int, number: int, siblings: _Siblings) -> None:
        """Puts a child up for choice, if there is such a one."""
        if number < len(siblings[0]):
            # Added in double and then rounded, two numbers of single precision give what they give in single;
            # beyond its range infinity, as in tensors.
            single.value = weights[parent] + siblings[0][number]
            if single.value > -inf:
                heappush(heap, (-single.value, level, parent, number, siblings))

    if depth:
        offer(1, 0, 0, children(1, 0))
    while heap and len(tokens) <= nodes:
        fallen, level, parent, number, siblings = heappop(heap)
        offer(level, parent, number + 1, siblings)
        _, ids, contexts = siblings
        tokens.append(ids[number])
        parents.append(parent)
        depths.append(level)
        weights.append(-fallen)
        if level < depth and contexts[number] >= 0:
            offer(level + 1, len(tokens) - 1, 0, children(level + 1, contexts[number]))
    return tokens, parents, depths, weights
