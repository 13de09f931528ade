"""Texts that the target wrote, with what it makes of them."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from treeflash.errors import InputError
from treeflash.target import HuggingFaceTarget
from treeflash.training.answers import MANIFEST, AnswerStore, Split
from treeflash.training.token_file import TokenFile


@attrs.frozen(eq=False)
class Text:
    """A text, read once.

    Attributes:
        token_ids: int64 `[n]`: prompt and answer.
        first: Index of the answer's first token.
        states: By layer, `[n, D]`: its outputs; the last layer's behind the target's final norm.
        settings: How it was decoded: temperature, seed and sequence, as `Decoder.generate` takes them.
    """

    token_ids: Tensor
    first: int
    states: dict[int, Tensor]
    settings: dict[str, Any]


def read_texts(
    folder: Path,
    target: HuggingFaceTarget,
    layers: Sequence[int],
    *,
    split: Split | None,
    limit: int | None,
) -> Iterator[Text]:
    """Reads texts of a data directory, one at a time.

    Args:
        folder: Made by `treeflash regenerate` with this target.
        target: The target.
        layers: Layers whose outputs are wanted; the last is always there.
        split: Which part of the texts; all when None.
        limit: Texts at most.

    Yields:
        Those with an answer of two tokens or more: the first is the prefill's.

    Raises:
        InputError: When the folder holds none, or another target's.
    """
    store = AnswerStore(folder)
    manifest = store.manifest()
    told = {key: manifest.get(key) for key in ("temperature", "seed")}
    if None in told.values():
        raise InputError(f"{folder / MANIFEST}: expected temperature and seed, found {told}")
    made_by = manifest.get("target")
    if made_by != target.digest():
        raise InputError(
            f"{folder}: expected answers of this target, {target.digest()}, found those of {made_by}"
        )
    file = TokenFile.open(store)
    rows = [row for row in file.rows(split).tolist() if file.answer_lengths[row] > 1][:limit]
    if not rows:
        part = "" if split is None else f" in its part {split!r}"
        raise InputError(f"{folder}: expected answers{part} to measure along, found none")
    wanted = sorted({*layers, target.num_layers - 1})
    for row in rows:
        begin, answer, end = file.bounds[row].tolist()
        ids = file.token_ids[begin:end].to(target.device, torch.int64)
        where = torch.arange(len(ids), device=target.device)
        outputs = target.read(ids, where, where[:, None] >= where, wanted)
        states = dict(zip(wanted, torch.split(outputs, target.hidden_size, dim=-1), strict=True))
        yield Text(ids, answer - begin, states, {**told, "sequence": file.key(row)})


def answers_digest(folder: Path) -> str:
    """A hash of all texts of a data directory.

    Args:
        folder: Made by `treeflash regenerate`.

    Returns:
        16 hexadecimal digits.

    Raises:
        InputError: When it holds something else.
    """
    found = hashlib.sha256()
    for row in AnswerStore(folder).rows():
        found.update(json.dumps([row.key, row.turn, row.split, row.prompt_ids, row.answer_ids]).encode())
    return found.hexdigest()[:16]


def conditionals(target: HuggingFaceTarget, text: Text, places: Tensor) -> Tensor:
    """The target's own distributions along a text.

    Args:
        target: The target.
        text: The text.
        places: int64 `[k]`: of the tokens they are behind.

    Returns:
        float32 `[k, V]`.
    """
    head = target.head(None, target.dtype)
    return target.finish(head(text.states[target.num_layers - 1][places]).float()).softmax(dim=-1)
