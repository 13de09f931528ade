"""What one decoding of one prompt came to, counted step by step."""

from typing import Any, Self

import attrs

from treeflash.engine import Emission, Generation

# Ranks are counted one by one up to here, and together from here on.
MOST_RANKS = 16


@attrs.define
class TreeCounts:
    """What the trees of a decoding looked like, and what was accepted of them.

    Attributes:
        nodes: Nodes at depth 1, 2, ..., over all steps.
        offered: By depth and rank among the children of the accepted node above, from the likeliest: how
            often there was such a child.
        accepted: How often it was the target's choice.
    """

    nodes: list[int] = attrs.field(factory=list)
    offered: list[list[int]] = attrs.field(factory=list)
    accepted: list[list[int]] = attrs.field(factory=list)

    def see(self, emission: Emission) -> None:
        """Counts a step.

        Args:
            emission: What it gave; one without a tree counts for nothing.
        """
        tree, record = emission.tree, emission.record
        if tree is None or record is None:
            return
        count = int(tree.num_nodes[0])
        parents, depths = tree.parents[0, :count].tolist(), tree.depths[0, :count].tolist()
        deepest = max(depths)
        while len(self.nodes) < deepest:
            self.nodes.append(0)
            self.offered.append([0] * MOST_RANKS)
            self.accepted.append([0] * MOST_RANKS)
        children: dict[int, list[int]] = {}
        for node in range(1, count):
            self.nodes[depths[node] - 1] += 1
            # By falling weight, as nodes are kept.
            children.setdefault(parents[node], []).append(node)
        # Tokens past a stop or limit are not counted, so neither are their nodes.
        path = emission.path[: record.num_accepted + 1]
        for depth, node in enumerate(path):
            # Behind the end of a text there is no choice to be right about.
            ends = emission.stop_reason is not None and depth == len(path) - 1
            below = children.get(node, [])
            if not below or (ends and record.num_emitted <= record.num_accepted):
                continue
            chosen = path[depth + 1] if depth + 1 < len(path) else None
            for rank, child in enumerate(below):
                place = min(rank, MOST_RANKS - 1)
                self.offered[depth][place] += 1
                self.accepted[depth][place] += child == chosen

    def __add__(self, other: Self) -> "TreeCounts":
        return TreeCounts(
            _added(self.nodes, other.nodes),
            _added_rows(self.offered, other.offered),
            _added_rows(self.accepted, other.accepted),
        )


@attrs.frozen
class Run:
    """One answer by one arm.

    Attributes:
        arm: Which arm.
        turn: Which turn of the prompt, from 0.
        prompt_tokens: Length of the conversation up to the answer.
        token_ids: The answer.
        stop_reason: Why it ended.
        prefill_seconds: Time to read the prompt.
        decode_seconds: Time of all that followed, the first draft included.
        emitted: Tokens each step added.
        accepted: Draft tokens each step accepted.
        drafted: Draft nodes each step verified.
        depth: Depth of each step's tree.
        seconds: Time of each stage, over all steps.
        pass_seconds: Time of the target's own passes, over all steps, a part of "verify"; None when not
            measured.
        trees: What the trees looked like.
        peak_bytes: Most memory in use meanwhile; None when it cannot be told.
        audit: How the answer compares with plain decoding: "identical", "near-tie" or "mismatch"; "lossy"
            when its verifier is lossy on purpose.
    """

    arm: str
    turn: int
    prompt_tokens: int
    token_ids: list[int]
    stop_reason: str
    prefill_seconds: float
    decode_seconds: float
    emitted: list[int]
    accepted: list[int]
    drafted: list[int]
    depth: list[int]
    seconds: dict[str, float]
    trees: TreeCounts
    peak_bytes: int | None
    audit: str
    # Not there in measurements that were begun before it was measured.
    pass_seconds: float | None = None

    @classmethod
    def of(
        cls,
        arm: str,
        turn: int,
        generation: Generation,
        pass_seconds: float | None,
        trees: TreeCounts,
        peak_bytes: int | None,
        audit: str,
    ) -> Self:
        """Keeps what a generation came to.

        Args:
            arm: Which arm.
            turn: Which turn.
            generation: The answer.
            pass_seconds: Measured meanwhile.
            trees: Counted meanwhile.
            peak_bytes: Measured meanwhile.
            audit: How it compares.
        """
        statistics = generation.statistics
        return cls(
            arm=arm,
            turn=turn,
            prompt_tokens=generation.prompt_tokens,
            token_ids=list(generation.token_ids),
            stop_reason=generation.stop_reason,
            prefill_seconds=statistics.prefill_seconds,
            decode_seconds=statistics.decode_seconds,
            emitted=[step.num_emitted for step in statistics.steps],
            accepted=[step.num_accepted for step in statistics.steps],
            drafted=[step.num_drafted for step in statistics.steps],
            depth=[step.tree_depth for step in statistics.steps],
            seconds=statistics.seconds_per_stage,
            trees=trees,
            peak_bytes=peak_bytes,
            audit=audit,
            pass_seconds=pass_seconds,
        )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Reads what `attrs.asdict` gives."""
        return cls(**{**value, "trees": TreeCounts(**value["trees"])})


def _added(one: list[int], other: list[int]) -> list[int]:
    longer, shorter = sorted((one, other), key=len, reverse=True)
    return [value + (shorter[index] if index < len(shorter) else 0) for index, value in enumerate(longer)]


def _added_rows(one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
    longer, shorter = sorted((one, other), key=len, reverse=True)
    return [_added(row, shorter[index] if index < len(shorter) else []) for index, row in enumerate(longer)]
