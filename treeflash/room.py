"""Room for the rows of a text: made as the text grows, not for the longest text allowed."""

import os

import torch
from torch import Tensor

from treeflash.errors import InputError

# Rows made at once at least: most texts never need more.
_BLOCK = 1024


def rows_to_make(needed: int, have: int = 0, most: int | None = None) -> int:
    """How many rows to make room for, when so many are needed.

    Half as many again as there are, so that a text of any length copies each of its rows a few times at most.

    Args:
        needed: Rows that must fit.
        have: Rows that there is room for.
        most: Rows that can ever be needed; None when that is not known.

    Returns:
        At least `needed`; more than that, unless `most` forbids.
    """
    rows = max(needed + 1, have + have // 2, _BLOCK)
    return max(needed, rows if most is None else min(rows, most))


def enlarged(states: Tensor, rows: int, kept: int, times: int = 1) -> Tensor:
    """Copies rows to a larger tensor; what is behind them is not initialised.

    Args:
        states: `[..., have, d]`.
        rows: Rows to make room for.
        kept: Rows to copy, from the first.
        times: As in `empty_rows`.

    Returns:
        `[..., rows, d]`.

    Raises:
        InputError: When there is not enough memory.
    """
    larger = empty_rows(states, rows, times)
    larger.narrow(-2, 0, kept).copy_(states.narrow(-2, 0, kept))
    return larger


def empty_rows(like: Tensor, rows: int, times: int = 1) -> Tensor:
    """Makes room for rows.

    Args:
        like: `[..., n, d]`: all but the number of rows.
        rows: How many.
        times: Tensors of this size that are going to be made: when not all of them fit, none is made.

    Returns:
        `[..., rows, d]`, not initialised.

    Raises:
        InputError: When there is not enough memory; with figures.
    """
    shape = (*like.shape[:-2], rows, like.shape[-1])
    needed = times * like.element_size() * torch.Size(shape).numel()
    memory = _memory(like.device)
    if memory is None or needed <= memory:
        try:
            return like.new_empty(shape)
        except torch.OutOfMemoryError:
            pass
        except RuntimeError as error:
            # The allocator of the CPU says so in a RuntimeError; on a GPU other faults speak of memory, too.
            if like.device.type != "cpu" or "memory" not in str(error):
                raise
    have = "" if memory is None else f" of {_spelled(memory)}"
    raise InputError(
        f"keys and values of {rows} positions take {_spelled(needed)}, which the memory{have} of "
        f"{like.device} has no room for; use a shorter prompt, or ask for fewer new tokens"
    )


def _spelled(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size:,} bytes"


def _memory(device: torch.device) -> int | None:
    """Bytes of memory that a device has, used or not; None where that is not told."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.type == "cpu" else None
    except (AttributeError, OSError, ValueError):
        return None
