"""What decoding gives: emissions while it runs, a generation at its end."""

from collections.abc import Sequence

import attrs

from treeflash.statistics import Statistics, StepRecord
from treeflash.tree import TokenTree


@attrs.frozen(eq=False)
class Emission:
    """What one step adds to a text.

    Attributes:
        token_ids: Its tokens, the last of all being a stop token when one ends the text.
        tree: The tree that was verified; None for the token that the prefill gives.
        path: Accepted nodes of the tree, the root included.
        record: The step's figures; None for the prefill.
        stop_reason: Why the text ends here; None when it goes on.
        seconds: Time it took, that of whoever receives it apart.
    """

    token_ids: list[int]
    tree: TokenTree | None
    path: list[int]
    record: StepRecord | None
    stop_reason: str | None
    seconds: float


@attrs.frozen
class Generation:
    """A finished text.

    Attributes:
        token_ids: New tokens, a stop token included.
        prompt_tokens: Length of the prompt.
        stop_reason: "stop_token", "max_new_tokens" or "position_limit".
        statistics: What happened.
    """

    token_ids: Sequence[int]
    prompt_tokens: int
    stop_reason: str
    statistics: Statistics

    @property
    def new_tokens(self) -> int:
        """How many tokens were written."""
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding: what the steps emitted over their time, prefill apart."""
        seconds = self.statistics.decode_seconds
        return self.statistics.num_emitted / seconds if seconds > 0 else 0.0
