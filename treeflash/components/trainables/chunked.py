"""Sums over very wide rows, a few at a time, forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Numbers in the logits that are there at once: few enough to stay in a CPU's cache; on a GPU half a gigabyte.
_NUMBERS = 1 << 19
_NUMBERS_ON_GPU = 1 << 27
_LEAST = 64  # rows, for the sake of the matrix product


def rows_at_once(width: int, device: torch.device) -> int:
    """How many rows of logits to make at a time.

    Args:
        width: Of a row.
        device: Where they are made.
    """
    numbers = _NUMBERS if device.type == "cpu" else _NUMBERS_ON_GPU
    return max(_LEAST, numbers // max(1, width))


def chunked_sum(
    function: Callable[..., Tensor], rows: Sequence[Tensor], tables: Sequence[Tensor] = (), *, step: int
) -> Tensor:
    """Sums a function over rows without keeping what it computes.

    The sum is linear in what each chunk gives, so a chunk's gradient can be taken as soon as its value is
    there: nothing as wide as the vocabulary outlives its chunk, and nothing is computed twice.

    Args:
        function: From as many rows of each of `rows`, then all of `tables`, to a float32 scalar.
        rows: `[R, ...]` each, R the same for all.
        tables: Whatever else it depends on with a gradient.
        step: Rows at a time.

    Returns:
        A float32 scalar.
    """
    out: Tensor = _ChunkedSum.apply(function, step, len(rows), *rows, *tables)  # type: ignore[no-untyped-call]
    return out


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], step: int, count: int, *inputs: Tensor) -> Tensor:
        rows, tables = inputs[:count], inputs[count:]
        needed = ctx.needs_input_grad[3:]
        gradients = [
            torch.zeros_like(part) if need else None for part, need in zip(inputs, needed, strict=True)
        ]
        total = torch.zeros((), dtype=torch.float32, device=inputs[0].device)
        leaves = [
            table.detach().requires_grad_(need) for table, need in zip(tables, needed[count:], strict=True)
        ]
        for start in range(0, rows[0].shape[0], step):
            span = slice(start, start + step)
            pieces = [
                part[span].detach().requires_grad_(need) for part, need in zip(rows, needed, strict=False)
            ]
            with torch.set_grad_enabled(any(needed)):
                value = function(*pieces, *leaves)
            total += value.detach()
            asked = [part for part in (*pieces, *leaves) if part.requires_grad]
            found = iter(torch.autograd.grad(value, asked) if asked else ())
            for slot, part in enumerate((*pieces, *leaves)):
                into = gradients[slot]
                if part.requires_grad and into is not None:
                    (into[span] if slot < count else into).add_(next(found))
        ctx.save_for_backward(*(part for part in gradients if part is not None))
        ctx.present = [part is not None for part in gradients]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = outer
        saved = iter(ctx.saved_tensors)
        return (None, None, None, *(next(saved) * scale if present else None for present in ctx.present))
