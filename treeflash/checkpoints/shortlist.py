"""The tokens that a drafter was trained to tell apart, stored beside its weights.

A drafter that was compared with its target over a shortlist says nothing of other tokens, and scoring them is
most of what a draft costs.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from treeflash.errors import CheckpointError
from treeflash.json_files import read_json

FILE = "shortlist.json"
_KEY = "token_ids"


def write_shortlist(folder: Path, token_ids: Tensor) -> None:
    """Writes a shortlist.

    Args:
        folder: The checkpoint's.
        token_ids: int64 `[V']`, ascending.

    Raises:
        CheckpointError: When the disk does not take it.
    """
    try:
        (folder / FILE).write_text(json.dumps({_KEY: token_ids.tolist()}) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder / FILE}: cannot be written ({error.strerror})") from None


def read_shortlist(folder: Path, vocab_size: int, faults: list[str]) -> Tensor | None:
    """Reads a checkpoint's shortlist.

    Args:
        folder: The checkpoint's.
        vocab_size: Tokens of the target.
        faults: Gets a sentence when it cannot be used.

    Returns:
        int64 `[V']`, ascending; None when there is none.
    """
    if not (folder / FILE).exists():
        return None
    token_ids = read_json(folder / FILE, CheckpointError).get(_KEY)
    if (
        not isinstance(token_ids, list)
        or not token_ids
        or any(type(token) is not int for token in token_ids)
        or token_ids != sorted(set(token_ids))
        or not 0 <= token_ids[0] <= token_ids[-1] < vocab_size
    ):
        faults.append(f"{FILE}: expected {_KEY}, ascending token ids below {vocab_size}; found others")
        return None
    return torch.tensor(token_ids)
