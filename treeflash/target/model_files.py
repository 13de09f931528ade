"""A model's files, looked at before a library opens them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from treeflash.checkpoints.reader import SHOWN_FAULTS, stored_tensors, weight_files
from treeflash.errors import InputError, first_line
from treeflash.json_files import read_json

# Sizes that take room, or time, as soon as a config or model is made of them. There is a tensor for each
# layer, and a number in the weights for each unit of the others.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_WIDTHS = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "intermediate_size",
    "head_dim",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
)
_POSITIONS = ("max_position_embeddings", "n_positions")
_MOST_POSITIONS = 1 << 24


def check_folder(folder: Path) -> None:
    """Makes sure of what a folder holds: configs, and weights in safetensors that can be theirs.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: When the weights are pickled, damaged, missing or named outside of the folder.
        InputError: When a config is no JSON object, or names other files, or sizes that would fill the memory
            before any weight is read.
    """
    config = read_json(folder / "config.json", InputError)
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json", InputError)
    named = _named_weights(config)
    single = folder / SAFE_WEIGHTS_NAME
    # The library takes a single file first.
    files = [single] if single.is_file() and named != SAFE_WEIGHTS_INDEX_NAME else weight_files(folder)
    tensors = [tensor for file in files for tensor in stored_tensors(file)]
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    limits = dict.fromkeys(_POSITIONS, (_MOST_POSITIONS, "a model can have"))
    limits |= dict.fromkeys(_LAYERS, (len(tensors), "the tensors there are"))
    limits |= dict.fromkeys(_WIDTHS, (numbers, "the numbers in all weights"))
    _check_sizes(config, limits)


def check_hub(name: str, config: Any, revision: str | None) -> None:
    """Makes sure that a model on the hub has weights in safetensors, and gets them.

    Args:
        name: Its name.
        config: The model's config.
        revision: Branch, tag or commit.

    Raises:
        InputError: When there are none, or they are not to be had.
    """
    _named_weights(config.to_dict())
    try:
        cached_file(name, SAFE_WEIGHTS_NAME, revision=revision)
    except OSError:
        try:
            cached_file(name, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        except OSError as error:
            raise InputError(f"{first_line(error)} (weights are read from safetensors alone)") from error


def check_report(report: Mapping[str, Any]) -> None:
    """Makes sure that all of a model comes from its files.

    Args:
        report: What the library says of a model that it has loaded.

    Raises:
        InputError: When tensors are missing or have other shapes: the library makes these up.
    """
    missing = sorted(report["missing_keys"])
    if missing:
        raise InputError(f"tensors are missing: {', '.join(missing)}")
    faults = [
        f"tensor {name}: expected shape {list(wanted)} by config.json, found {list(found)}"
        for name, found, wanted in sorted(report["mismatched_keys"])
    ]
    if faults:
        raise InputError("; ".join(faults[:SHOWN_FAULTS]))


def _named_weights(config: Mapping[str, Any]) -> str | None:
    """The file that a config says weights are in; the library may take one of another kind from it."""
    named: str | None = config.get("transformers_weights")
    if named not in (None, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        raise InputError(f"config.json: transformers_weights: expected {SAFE_WEIGHTS_NAME}, found {named!r}")
    return named


def _check_sizes(config: Mapping[str, Any], limits: Mapping[str, tuple[int, str]]) -> None:
    """Looks at a config and at those inside it, as models of several parts have them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(value, limits)
        elif key in limits and isinstance(value, int) and value > limits[key][0]:
            limit, what = limits[key]
            raise InputError(f"config.json: {key}: expected at most {limit}, {what}, found {value}")
