"""The target's own answers to prompts: a drafter learns the target, not the data set."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.engine.stopping import POSITION_LIMIT
from treeflash.prompts import Prompt
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget
from treeflash.target.text import TextCodec
from treeflash.training.answers import AnswerRow, AnswerStore, split_of
from treeflash.training.batch_decoding import decode_batch
from treeflash.training.locks import held
from treeflash.training.token_file import TokenFile


@attrs.frozen
class RegenerationSettings:
    """What answers depend on, beside the target and the prompts.

    Attributes:
        max_new_tokens: Of an answer, at most.
        temperature: 0 takes the likeliest token.
        seed: Of the draws.
        heldout: Share of the prompts to hold out.
        batch_size: Prompts answered together.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    heldout: float = 0.02
    batch_size: int = 64


@attrs.frozen
class Progress:
    """How far a run is.

    Attributes:
        rows: Answers written, those of earlier runs included.
        total_rows: Answers there will be.
        tokens: Tokens written in this run.
    """

    rows: int
    total_rows: int
    tokens: int


def regenerate(
    target: HuggingFaceTarget,
    model: str,
    prompts: Sequence[Prompt],
    folder: Path,
    settings: RegenerationSettings,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> AnswerStore:
    """Answers every prompt once, from where an earlier run stopped.

    Args:
        target: The target, with its tokenizer.
        model: What the recipe calls it, for the record.
        prompts: What to answer; every turn of each.
        folder: The data directory.
        settings: How to answer.
        on_progress: Called as the run goes on.

    Returns:
        The directory, complete.

    Raises:
        InputError: When the directory was begun with other settings or is in use by another process, a
            prompt is too long, or the disk is full.
    """
    Draws(settings.temperature, settings.seed)  # refuses what it cannot draw by
    codec = target.require_text()
    batches = _batches(target, codec, prompts, settings.batch_size)
    store = AnswerStore(folder)
    total = sum(len(prompt.turns) for prompt in prompts)
    rows = tokens = 0

    def count(written: int) -> None:
        nonlocal tokens
        tokens += written
        on_progress(Progress(rows, total, tokens))

    with held(folder):
        whole = store.open(_manifest(target, model, prompts, settings))
        for number, batch in enumerate(batches):
            if number not in whole:
                store.write(number, _answer(target, codec, batch, settings, count))
            rows += sum(len(prompt.turns) for prompt in batch)
            on_progress(Progress(rows, total, tokens))
        TokenFile.open(store)  # made here, where nobody else writes
    return store


def _batches(
    target: HuggingFaceTarget, codec: TextCodec, prompts: Sequence[Prompt], size: int
) -> list[list[Prompt]]:
    """Prompts of similar length together, the longest first: what does not fit fails early."""
    found = codec.first_lengths(prompts, target.max_positions, "prompts too long for the target")
    lengths = {prompt.key: length for prompt, length in zip(prompts, found, strict=True)}
    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.turns), -lengths[prompt.key], prompt.key))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _answer(
    target: HuggingFaceTarget,
    codec: TextCodec,
    batch: Sequence[Prompt],
    settings: RegenerationSettings,
    on_tokens: Callable[[int], None],
) -> list[AnswerRow]:
    """Answers the turns of a batch, each turn of all its prompts together.

    A conversation that has outgrown the target ends there: its other answers are empty.
    """
    rows: list[AnswerRow] = []
    limit = target.max_positions
    said: dict[str, list[str]] = {prompt.key: [] for prompt in batch}
    for turn in range(max(len(prompt.turns) for prompt in batch)):
        speaking, encoded = list[Prompt](), list[list[int]]()
        for prompt in batch:
            if turn >= len(prompt.turns):
                continue
            goes_on = len(said[prompt.key]) == 2 * turn
            ids = codec.encode_chat(*said[prompt.key], prompt.turns[turn]) if goes_on else []
            if goes_on and (limit is None or len(ids) < limit):
                said[prompt.key].append(prompt.turns[turn])
                speaking.append(prompt)
                encoded.append(ids)
            else:
                split = split_of(prompt.key, settings.heldout)
                rows.append(AnswerRow(prompt.key, turn, split, ids, [], "", POSITION_LIMIT))
        if not speaking:
            continue
        answers = decode_batch(
            target,
            encoded,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            sequences=[int(prompt.key, 16) for prompt in speaking],
            on_tokens=on_tokens,
        )
        for prompt, prompt_ids, answer in zip(speaking, encoded, answers, strict=True):
            text = codec.decode(answer.token_ids)
            said[prompt.key].append(text)
            split = split_of(prompt.key, settings.heldout)
            rows.append(
                AnswerRow(prompt.key, turn, split, prompt_ids, answer.token_ids, text, answer.stop_reason)
            )
    return rows


def _manifest(
    target: HuggingFaceTarget, model: str, prompts: Sequence[Prompt], settings: RegenerationSettings
) -> dict[str, Any]:
    keys = hashlib.sha256("".join(sorted(prompt.key for prompt in prompts)).encode()).hexdigest()[:16]
    return {
        "model": model,
        "target": target.digest(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "prompts": keys,
        "rows": sum(len(prompt.turns) for prompt in prompts),
        **attrs.asdict(settings),
    }
