"""Attention masks by position: full and sliding layers, prompts and trees."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from treeflash.errors import UnsupportedTargetError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: Any) -> dict[str, int | None]:
    """Which kinds of attention layer a model has, and how far back each looks.

    Args:
        config: The model's text config.

    Returns:
        Window by kind: positions a query sees, itself included; None for all.

    Raises:
        UnsupportedTargetError: For layers that cannot be verified in trees.
    """
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or [FULL if window is None else SLIDING])
    others = sorted(kinds - {FULL, SLIDING})
    if others:
        raise UnsupportedTargetError(
            f"layers of kind {', '.join(others)}: a tree needs layers that keep keys and values per "
            "position, full or in a sliding window; a recurrent state cannot branch"
        )
    if getattr(config, "alibi", False):
        raise UnsupportedTargetError(
            "ALiBi: attention is biased by the index of a key in the cache, and a tree's nodes do not stand "
            "in the order of their positions"
        )
    local = getattr(config, "window_size", None)
    if local is not None:
        raise UnsupportedTargetError(
            f"a local window (window_size = {local}) that the model counts by index, not by position"
        )
    if SLIDING in kinds and window is None:
        raise UnsupportedTargetError("sliding layers without a sliding_window in the config")
    return {kind: window if kind == SLIDING else None for kind in sorted(kinds)}


def additive_masks(
    windows: Mapping[str, int | None],
    visible: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Builds the masks that a model's attention adds to its scores.

    A score in float16 or bfloat16 is added up in float32, and can exceed the dtype's greatest value: only
    infinity outweighs every score, and each query sees itself at least, so that no row is empty.

    Args:
        windows: From `layer_windows`.
        visible: bool `[B, n, m]`: which keys each query may see, the window apart.
        query_positions: int64 `[B, n]`.
        key_positions: int64 `[B, m]`.
        dtype: Of the model.

    Returns:
        `[B, 1, n, m]`, 0 or -inf; by kind of layer when there are several.
    """
    masks = {}
    for kind, window in windows.items():
        seen = visible
        if window is not None:
            seen = seen & (query_positions[:, :, None] - key_positions[:, None, :] < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, -torch.inf)[:, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))
