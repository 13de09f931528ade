"""Between text and token ids: chat template, raw prompts, streaming."""

import itertools
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from treeflash.errors import InputError, bullet_list, first_line
from treeflash.prompts import Prompt, is_text

# Characters of a prompt that an error shows, to find it by, and prompts that it names.
_SHOWN, _SHOWN_FAULTS = 40, 20
_RAW = "`treeflash generate --raw` takes a prompt as it is"


@attrs.frozen(eq=False)
class TextCodec:
    """A tokenizer as decoding uses it.

    Attributes:
        tokenizer: A Hugging Face tokenizer.
    """

    tokenizer: Any

    def encode_chat(self, *turns: str) -> list[int]:
        """Writes a conversation through the chat template, up to where the next answer begins, thinking off.

        Args:
            *turns: What the user says; with more than one, the answers stand between the user's turns.

        Returns:
            Token ids, special tokens as the template has them.

        Raises:
            InputError: When there is no chat template or it fails, nothing is left to decode from, or a
                turn is no text.
        """
        self._check_text(turns)
        templates = getattr(self.tokenizer, "chat_template", None)
        if not templates:
            raise InputError(f"the target's tokenizer has no chat template; {_RAW}")
        if isinstance(templates, Mapping) and "default" not in templates:
            found = ", ".join(map(str, templates))
            raise InputError(
                f"the target's tokenizer has chat templates ({found}), expected one called default; {_RAW}"
            )
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
        # Models that can think aloud first are measured without, as papers do. A template that knows no
        # such switch passes it over.
        with _blamed("chat template", turns[-1], f"; {_RAW}"):
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        # The template has written the special tokens already.
        return self._encode(text, add_special_tokens=False)

    def encode_raw(self, prompt: str) -> list[int]:
        """Takes a prompt as it is.

        Args:
            prompt: The text.

        Returns:
            Token ids, with the special tokens that the tokenizer adds, unless the text begins with its
            beginning-of-text token already.

        Raises:
            InputError: When there is nothing to decode from, or it is no text.
        """
        self._check_text((prompt,))
        begin = getattr(self.tokenizer, "bos_token", None)
        has_special = isinstance(begin, str) and begin != "" and prompt.startswith(begin)
        return self._encode(prompt, add_special_tokens=not has_special)

    def first_lengths(self, prompts: Sequence[Prompt], limit: int | None, headline: str) -> list[int]:
        """Counts the tokens of prompts' first turns, before anything is spent on answering them.

        Args:
            prompts: The prompts.
            limit: The target's positions; None without one.
            headline: What to say before those without room for an answer.

        Returns:
            A number for each.

        Raises:
            InputError: Naming all that leave no room for an answer.
        """
        lengths = [len(self.encode_chat(prompt.turns[0])) for prompt in prompts]
        faults = [
            f"{prompt.turns[0][:_SHOWN]!r} has {count} tokens, expected fewer than {limit}"
            for prompt, count in zip(prompts, lengths, strict=True)
            if limit is not None and count >= limit
        ]
        if faults:
            raise InputError(bullet_list(headline, faults, most=_SHOWN_FAULTS))
        return lengths

    def decode(self, token_ids: Sequence[int]) -> str:
        """Reads token ids, special ones left out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with _blamed("tokenizer", text):
            token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise InputError("the prompt is empty: expected at least one token to decode from")
        return token_ids

    @staticmethod
    def _check_text(texts: Sequence[Any]) -> None:
        if not texts:
            raise InputError("expected at least one turn of a conversation, found none")
        for text in texts:
            if not isinstance(text, str):
                raise InputError(
                    "expected a text, or the texts of a conversation one by one, found "
                    f"{reprlib.repr(text)} ({type(text).__name__})"
                )
            if not is_text(text):  # bytes of another encoding, as a shell passes them on
                raise InputError(f"expected a prompt of whole characters in UTF-8, found {_beginning(text)}")


@contextmanager
def _blamed(part: str, text: str, hint: str = "") -> Iterator[None]:
    """Turns whatever a tokenizer or its template raises into one error."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"the target's {part} fails for {_beginning(text)} ({said}){hint}") from error


def _beginning(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


@attrs.define(eq=False)
class TextStream:
    """Turns tokens into text as they come, never half a character.

    Attributes:
        codec: The tokenizer.
    """

    codec: TextCodec
    _token_ids: list[int] = attrs.field(factory=list, init=False)
    _read: int = attrs.field(default=0, init=False)
    _shown: int = attrs.field(default=0, init=False)

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens.

        Args:
            token_ids: The next ones.

        Returns:
            The text that is certain now and was not before.
        """
        self._token_ids.extend(token_ids)
        # Decoding starts at the last border of a piece, not at the beginning: the cost of a step must
        # not grow with the text.
        before = self.codec.decode(self._token_ids[self._read : self._shown])
        now = self.codec.decode(self._token_ids[self._read :])
        # A piece that shows nothing yet (half a character, a special token) is no border.
        if now.endswith("\N{REPLACEMENT CHARACTER}") or len(now) <= len(before):
            return ""
        self._read, self._shown = self._shown, len(self._token_ids)
        return now[len(before) :]

    def close(self) -> str:
        """Gives the rest, whole characters or not."""
        before = self.codec.decode(self._token_ids[self._read : self._shown])
        return self.codec.decode(self._token_ids[self._read :])[len(before) :]
