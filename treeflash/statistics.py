"""What happened while decoding, step by step; every figure is derived from these records."""

from collections.abc import Mapping, Sequence
from statistics import median

import attrs

# Steps without a draft that say what one takes: the last of any text may have had no room for one.
_FEWEST_PLAIN = 5


@attrs.frozen
class StepRecord:
    """One verification pass of one sequence.

    Attributes:
        num_drafted: Draft nodes in the tree.
        tree_depth: Depth of the deepest of them.
        num_accepted: Draft tokens accepted that belong to the text: none past a stop or limit.
        num_emitted: Tokens added to the text, the bonus token included unless the text ends before it.
        seconds: Time of each stage by its name; empty when it was not measured.
        total: Time of all of it.
        tried: Whether anything was drafted, though the tree may have come to nothing.
        expected: Draft tokens that the weights of its nodes promised; None when the verifier does not say.
    """

    num_drafted: int
    tree_depth: int
    num_accepted: int
    num_emitted: int
    seconds: Mapping[str, float] = attrs.field(factory=dict, repr=False)
    total: float = attrs.field(default=0.0, repr=False, eq=False)
    tried: bool = attrs.field(default=False, repr=False, eq=False)
    expected: float | None = attrs.field(default=None, repr=False, eq=False)


@attrs.frozen
class Statistics:
    """A decoding so far.

    Attributes:
        steps: The records, in order. The prefill and the token it gives are not among them.
        prefill_seconds: Time to read the prompt.
        decode_seconds: Time of all that followed.
    """

    steps: Sequence[StepRecord]
    prefill_seconds: float
    decode_seconds: float

    @property
    def num_emitted(self) -> int:
        """Tokens emitted by the steps."""
        return sum(step.num_emitted for step in self.steps)

    @property
    def share_drafted(self) -> float:
        """Share of the steps that drafted something; 0 when there was none."""
        return sum(step.tried for step in self.steps) / len(self.steps) if self.steps else 0.0

    @property
    def plain_seconds(self) -> float | None:
        """Median time of the steps that drafted nothing; None when there are too few to tell, or no times."""
        times = [step.total for step in self.steps if not step.tried and step.total > 0]
        return median(times) if len(times) >= _FEWEST_PLAIN else None

    @property
    def block_efficiency(self) -> float:
        """Tau: emitted tokens per verification pass; 0 when there was none."""
        return self.num_emitted / len(self.steps) if self.steps else 0.0

    @property
    def accepted_per_depth(self) -> list[int]:
        """How many steps accepted at least to depth 1, 2, ..., down to the deepest draft."""
        deepest = max((step.tree_depth for step in self.steps), default=0)
        return [sum(step.num_accepted >= depth for step in self.steps) for depth in range(1, deepest + 1)]

    @property
    def drafted_per_depth(self) -> list[int]:
        """How many steps had a draft that reached depth 1, 2, ..."""
        deepest = max((step.tree_depth for step in self.steps), default=0)
        return [sum(step.tree_depth >= depth for step in self.steps) for depth in range(1, deepest + 1)]

    @property
    def seconds_per_stage(self) -> dict[str, float]:
        """Total time of each stage that was measured."""
        total: dict[str, float] = {}
        for step in self.steps:
            for stage, seconds in step.seconds.items():
                total[stage] = total.get(stage, 0.0) + seconds
        return total
