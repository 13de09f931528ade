"""What drafts would have been worth along a text: block efficiency by budget, and how sure they were."""

from collections.abc import Sequence
from typing import Any

import attrs

from treeflash.engine import Decoder, Emission
from treeflash.engine.replay import Replay
from treeflash.evaluation.texts import Text
from treeflash.target import HuggingFaceTarget

_BINS = 10


@attrs.define
class Tally:
    """Steps and what they emitted.

    Attributes:
        steps: Verification passes.
        emitted: Tokens they emitted.
    """

    steps: int = 0
    emitted: int = 0

    @property
    def block_efficiency(self) -> float:
        """Tokens a step."""
        return self.emitted / self.steps if self.steps else 0.0

    def see(self, emission: Emission) -> None:
        """Counts a step."""
        if emission.record is not None:
            self.steps += 1
            self.emitted += emission.record.num_emitted


@attrs.define
class Calibration:
    """Predicted weights of drafted nodes against what became of them.

    Attributes:
        nodes: Nodes by predicted probability, in tenths.
        predicted: Sums of their predictions.
        accepted: How many were accepted.
        steps: Trees.
        reached: Draft tokens that the steps accepted.
    """

    nodes: list[int] = attrs.field(factory=lambda: [0] * _BINS)
    predicted: list[float] = attrs.field(factory=lambda: [0.0] * _BINS)
    accepted: list[int] = attrs.field(factory=lambda: [0] * _BINS)
    steps: int = 0
    reached: int = 0

    def see(self, emission: Emission) -> None:
        """Counts a step; the last of a text, which is cut off, is left out."""
        if emission.tree is None or emission.stop_reason is not None:
            return
        self.steps += 1
        self.reached += len(emission.path) - 1
        on_path = set(emission.path)
        count = int(emission.tree.num_nodes[0])
        for node, weight in enumerate(emission.tree.log_weights[0, 1:count].exp().tolist(), start=1):
            place = min(int(weight * _BINS), _BINS - 1)
            self.nodes[place] += 1
            self.predicted[place] += weight
            self.accepted[place] += node in on_path

    def summary(self) -> dict[str, Any]:
        """Shares by bin, and expected against real draft tokens accepted in a step."""
        bins = [
            {"nodes": nodes, "predicted": predicted / nodes, "accepted": accepted / nodes}
            for nodes, predicted, accepted in zip(self.nodes, self.predicted, self.accepted, strict=True)
            if nodes
        ]
        steps = max(1, self.steps)
        return {
            "bins": bins,
            "expected_accepted": sum(self.predicted) / steps,
            "accepted": self.reached / steps,
        }


@attrs.define(eq=False)
class Simulation:
    """One recipe along texts.

    Attributes:
        decoder: Its parts.
        budgets: Budgets to try; none when its selector has no budget.
        own: Steps at its own budget.
        by_budget: Steps at each.
        calibration: At its own budget.
    """

    decoder: Decoder
    budgets: Sequence[int]
    own: Tally = attrs.field(factory=Tally, init=False)
    by_budget: dict[int, Tally] = attrs.field(factory=dict, init=False)
    calibration: Calibration = attrs.field(factory=Calibration, init=False)

    def follow(self, target: HuggingFaceTarget, text: Text) -> None:
        """Takes the steps that decoding the text would.

        Args:
            target: The target.
            text: The text.
        """

        def see(emission: Emission) -> None:
            self.own.see(emission)
            self.calibration.see(emission)

        self._replay(self.decoder, target, text, see)
        selector: Any = self.decoder.selector
        for budget in self.budgets if hasattr(selector, "budget") else ():
            if budget == selector.budget:
                self.by_budget[budget] = self.own
                continue
            decoder = attrs.evolve(self.decoder, selector=attrs.evolve(selector, budget=budget))
            self._replay(decoder, target, text, self.by_budget.setdefault(budget, Tally()).see)

    def _replay(self, decoder: Decoder, target: HuggingFaceTarget, text: Text, see: Any) -> None:
        replay: Any = Replay(target, text.token_ids, text.states)
        length = len(text.token_ids) - text.first
        try:
            attrs.evolve(decoder, target=replay).generate(
                text.token_ids[: text.first], max_new_tokens=length, on_emission=see
            )
        finally:
            # Parts are bound to one target at a time: back to their own.
            attrs.evolve(decoder, target=target)
