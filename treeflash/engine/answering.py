"""From words to words: a decoder asked as a person asks."""

from collections.abc import Callable, Iterator
from typing import Any

from treeflash.engine.generation import Emission
from treeflash.engine.stopping import STOP_TOKEN
from treeflash.errors import InputError
from treeflash.target.text import TextCodec, TextStream


def codec_of(target: Any) -> TextCodec:
    """The tokenizer of a target.

    Args:
        target: The target.

    Raises:
        InputError: When the target reads no text.
    """
    require_text = getattr(target, "require_text", None)
    if require_text is None:
        raise InputError(
            f"expected a target with a tokenizer, to read text with, found {type(target).__name__}; "
            "give token ids to generate() instead"
        )
    codec: TextCodec = require_text()
    return codec


def text_pieces(
    target: Any, decode: Callable[..., Iterator[Emission]], *turns: str, raw: bool, **settings: Any
) -> Iterator[str]:
    """Answers, piece by piece.

    Args:
        target: The target.
        decode: Decodes token ids step by step, as `Decoder.stream` does.
        *turns: What the user says; with more than one, the answers stand between the user's turns.
        raw: Take the one turn as it is, without the chat template.
        **settings: As `Decoder.stream` takes them.

    Yields:
        Text as soon as it is certain, never half a character.

    Raises:
        InputError: For a prompt or setting that cannot be decoded.
    """
    codec = codec_of(target)
    if raw and len(turns) != 1:
        raise InputError(f"raw: expected one text to continue, found {len(turns)} turns of a chat")
    prompt = codec.encode_raw(*turns) if raw else codec.encode_chat(*turns)
    stream = TextStream(codec)
    for emission in decode(prompt, **settings):
        stopped = emission.stop_reason == STOP_TOKEN
        piece = stream.push(emission.token_ids[:-1] if stopped else emission.token_ids)
        if piece:
            yield piece
    rest = stream.close()
    if rest:
        yield rest
