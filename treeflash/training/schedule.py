"""Learning rate by step, and when a run is no longer getting anywhere."""

import math

import attrs

_MEMORY = 0.95
_MARGIN = 1.0


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Rises in a line, then falls along a cosine to zero.

    Args:
        step: From 0.
        steps: In all.
        peak: Highest rate.
        warmup: Share of the steps that the rise takes.

    Returns:
        The rate of that step.
    """
    rise = max(1, round(steps * warmup))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


@attrs.define
class Watch:
    """Follows the loss of a run.

    Attributes:
        recent: Its running mean.
        lowest: The least that was.
    """

    recent: float | None = None
    lowest: float = math.inf

    def see(self, loss: float) -> str | None:
        """Takes in a step's loss.

        Args:
            loss: Of the step.

        Returns:
            What is wrong with it, or None.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        self.recent = loss if self.recent is None else _MEMORY * self.recent + (1 - _MEMORY) * loss
        self.lowest = min(self.lowest, self.recent)
        if self.recent - self.lowest > max(_MARGIN, abs(self.lowest)):
            return f"the loss diverges: its mean rose from {self.lowest:.2f} to {self.recent:.2f}"
        return None
