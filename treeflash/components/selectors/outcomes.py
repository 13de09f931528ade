"""What drafting has lately brought in a text and what it took, by the records of its steps."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from statistics import median
from typing import Self

import attrs

from treeflash.statistics import StepRecord

# Drafts looked back at, and what each says of the next one, if the draft after it says 1: about ten count.
_RECENT = 24
_FADING = 0.9
# The same for how far weights come true, which changes less.
_TRUSTED = 100
_TRUST_FADING = 0.97
# Draft tokens accepted as promised that a text is credited with before it has shown any.
_CREDIT = 5.0
# Tokens at the pace of plain decoding that it is credited with.
_PLAIN_CREDIT = 10.0
# Steps without a draft that say what such a step takes, and how far back they may lie.
_PLAIN_STEPS, _FEWEST_PLAIN = 16, 3
_HORIZON = 256


@attrs.frozen
class Outcomes:
    """What the last steps of a text came to.

    A slow moment of the machine counts for nothing: each step is taken to last as long as a pass over its
    tree was timed to take, at the machine's present pace, and what steps usually take beside their pass.

    Attributes:
        drafts: How many drafts were looked at.
        largest: Draft nodes of the largest of their trees.
        since: Steps without a draft since the last one.
        price: Tokens that a second of a pass is worth: how fast the text grows, in seconds as passes
            were timed.
        trust: Draft tokens accepted by those that weights promised: what to multiply weights by.
        loss: Plain steps that a draft loses, on average: its time in plain steps, less the tokens it brought.
        error: Standard error of `loss`.
    """

    drafts: int
    largest: int
    since: int
    price: float
    trust: float
    loss: float
    error: float

    @classmethod
    def of(cls, steps: Sequence[StepRecord], costs: Sequence[float]) -> Self | None:
        """Looks back.

        Args:
            steps: The records of a text, in order.
            costs: Seconds that a pass over a tree of 0, 1, 2, ... nodes was timed to take, up to the largest.

        Returns:
            What they say; None when nothing was drafted.
        """
        tried = list(islice((step for step in reversed(steps) if step.tried), _TRUSTED))
        if not tried:
            return None
        drafted = tried[:_RECENT]
        # On a GPU stages are timed on request alone.
        passes = [step.seconds.get("verify", costs[step.num_drafted]) for step in drafted]
        pace = median(taken / costs[step.num_drafted] for step, taken in zip(drafted, passes, strict=True))
        beside = median(max(0.0, step.total - taken) for step, taken in zip(drafted, passes, strict=True))
        # A pass over the root alone is bound by other things than a larger one: best seen by itself.
        plain = _plain_seconds(steps)
        if plain is None:
            plain = costs[0] * pace + median(step.seconds.get("commit", 0.0) for step in drafted)
        taken = [(costs[step.num_drafted] * pace + beside) / plain for step in drafted]
        shares = [_FADING**age for age in range(len(drafted))]
        count = sum(shares)
        losses = [spent - step.num_emitted for step, spent in zip(drafted, taken, strict=True)]
        loss = _sum(shares, losses) / count
        variance = _sum(shares, [(value - loss) ** 2 for value in losses]) / count
        brought = _sum(shares, [step.num_emitted for step in drafted])
        # In tokens per plain step.
        rate = (_PLAIN_CREDIT + brought) / (_PLAIN_CREDIT + _sum(shares, taken))
        return cls(
            drafts=len(drafted),
            largest=max(step.num_drafted for step in drafted),
            since=next(back for back, step in enumerate(reversed(steps)) if step.tried),
            price=rate / plain * pace,
            trust=_trust(tried),
            loss=loss,
            error=math.sqrt(variance * _sum(shares, shares)) / count,
        )


def _sum(shares: Sequence[float], values: Iterable[float]) -> float:
    return sum(share * value for share, value in zip(shares, values, strict=True))


def _plain_seconds(steps: Sequence[StepRecord]) -> float | None:
    """What a step without a draft takes in this text, if there were some."""
    latest = (step.total for step in reversed(steps[-_HORIZON:]) if not step.tried)
    found = list(islice(latest, _PLAIN_STEPS))
    return median(found) if len(found) >= _FEWEST_PLAIN else None


def _trust(tried: Sequence[StepRecord]) -> float:
    """How far weights have come true, given the last draft first; empty trees only let the others fade."""
    accepted = expected = 0.0
    for age, step in enumerate(tried):
        if step.expected is not None:
            accepted += step.num_accepted * _TRUST_FADING**age
            expected += step.expected * _TRUST_FADING**age
    return (_CREDIT + accepted) / (_CREDIT + expected)
