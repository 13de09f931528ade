"""When a text ends, and what of a step still belongs to it."""

from collections.abc import Sequence

import attrs

STOP_TOKEN = "stop_token"
MAX_NEW_TOKENS = "max_new_tokens"
POSITION_LIMIT = "position_limit"


@attrs.frozen
class StopRule:
    """Ends a text at a stop token or a length.

    Attributes:
        stop_ids: Tokens that end it; the one that does belongs to it.
        limit: Tokens it may have.
        limit_reason: What the limit is called.
    """

    stop_ids: frozenset[int]
    limit: int
    limit_reason: str

    @classmethod
    def make(
        cls, stop_ids: Sequence[int], prompt_tokens: int, max_new_tokens: int, max_positions: int | None
    ) -> "StopRule":
        """Takes the nearer of two limits.

        Args:
            stop_ids: Tokens that end the text.
            prompt_tokens: Length of the prompt.
            max_new_tokens: What the caller allows.
            max_positions: What the target allows, prompt included; None for no limit.

        Returns:
            The rule.
        """
        room = max_new_tokens if max_positions is None else max_positions - prompt_tokens
        if room < max_new_tokens:
            return cls(frozenset(stop_ids), room, POSITION_LIMIT)
        return cls(frozenset(stop_ids), max_new_tokens, MAX_NEW_TOKENS)

    def clip(self, tokens: Sequence[int], have: int) -> tuple[list[int], str | None]:
        """Cuts what a step emits behind the end of the text.

        Args:
            tokens: The step's tokens.
            have: Tokens the text had before.

        Returns:
            The tokens that belong to the text, and why it ended, None when it goes on.
        """
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            if token in self.stop_ids:
                return kept, STOP_TOKEN
            if have + len(kept) == self.limit:
                return kept, self.limit_reason
        return kept, None
