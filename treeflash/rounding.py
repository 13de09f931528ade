"""How far rounding takes two ways of computing the same logits apart."""

import torch
from torch import Tensor

# Largest root-mean-square difference, in units of the logits' spread, that rounding explains.
_LARGEST = {torch.float64: 1e-6, torch.float32: 1e-3}
_LARGEST_COARSE = 0.15


def difference(found: Tensor, expected: Tensor) -> float:
    """How far logits are apart.

    Args:
        found: `[..., V]`.
        expected: `[..., V]`.

    Returns:
        The root-mean-square difference, in units of the standard deviation of `expected`; no number where
        all logits are one.
    """
    found, expected = found.double(), expected.double()
    return float((found - expected).square().mean().sqrt() / expected.std())


def largest_difference(dtype: torch.dtype) -> float:
    """The largest difference that rounding explains.

    Args:
        dtype: The model's.
    """
    return _LARGEST.get(dtype, _LARGEST_COARSE)
