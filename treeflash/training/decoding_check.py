"""The last check of a run: the drafter it wrote drafts as far as training simulated."""

from collections.abc import Sequence

import attrs

from treeflash.engine import Decoder
from treeflash.engine.chains import chain_steps, spread_anchors
from treeflash.target import HuggingFaceTarget
from treeflash.training.texts import Text, pack

# Enough for a mean within a few per cent, and a few seconds beside hours of training.
TEXTS, _STEPS = 8, 32
# What the choice of places, and rounding, can explain of a difference.
_AGREEMENT = 0.15


@attrs.frozen
class DecodingCheck:
    """Tokens a step along some held-out texts, by a chain of likeliest tokens.

    Attributes:
        simulated: As training measured them.
        decoded: As the written drafter emits them.
        steps: Decoding steps taken.
    """

    simulated: float
    decoded: float
    steps: int

    @property
    def agrees(self) -> bool:
        """Whether the two differ by no more than places and rounding explain."""
        return abs(self.decoded - self.simulated) <= _AGREEMENT * self.simulated

    def sentence(self) -> str:
        """What to tell the user."""
        found = (
            f"along held-out texts the drafter emits {self.decoded:.2f} tokens a step ({self.steps} steps), "
            f"and training simulated {self.simulated:.2f}"
        )
        if self.agrees:
            return found
        return (
            f"warning: {found}: training and decoding do not compute the same, so do not trust the simulated "
            "figures; treeflash.testing.contracts.TrainableContract finds such differences"
        )


def check_decoding(
    decoder: Decoder, target: HuggingFaceTarget, texts: Sequence[Text], simulated: float
) -> DecodingCheck:
    """Takes decoding steps along texts.

    Args:
        decoder: Of the drafter that was written.
        target: The target that wrote the texts.
        texts: Prompts and answers.
        simulated: Tokens a step that training measured along the same texts.

    Returns:
        Both figures.
    """
    emitted: list[int] = []
    for text in texts:
        ids = pack([text], target.device).token_ids
        anchors = spread_anchors(len(text.prompt_ids), len(ids), _STEPS)
        emitted += chain_steps(decoder, target, ids, anchors)
    return DecodingCheck(simulated, sum(emitted) / max(1, len(emitted)), len(emitted))
