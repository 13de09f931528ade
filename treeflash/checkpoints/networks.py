"""From a checkpoint's sizes to a network on the target's device."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from treeflash.checkpoints.reader import Checkpoint
from treeflash.errors import CheckpointError, bullet_list, first_line
from treeflash.target_interface import Target

N = TypeVar("N", bound=nn.Module)

# Further than any context is long.
_FAR = 1 << 24


def sized(checkpoint: Checkpoint, make: Callable[[], N], faults: list[str]) -> N:
    """Makes a network without memory for its weights.

    Args:
        checkpoint: Whose config sizes it.
        make: Makes it.
        faults: Found so far.

    Returns:
        The network, on the meta device.

    Raises:
        CheckpointError: When the config cannot be used; with all faults.
    """
    try:
        with torch.device("meta"):
            return make()
    except Exception as error:  # the config class checks values in its own ways
        faults.append(f"config.json cannot be used: {first_line(error)}")
        raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults)) from None


def placed(checkpoint: Checkpoint, network: Any, target: Target) -> Any:
    """Brings a network whose weights are loaded to where it decodes, and makes its rotary embedding.

    Args:
        checkpoint: Where it is from.
        network: The network, with a method `prepare_rotary`.
        target: The target.

    Returns:
        The network, in the target's dtype on its device.

    Raises:
        CheckpointError: When its rotary positions cannot be used.
    """
    network = network.to(device=target.device, dtype=target.dtype).eval()
    try:
        fault = _rotary_fault(network)
    except Exception as error:  # each kind of rotary scaling checks values in its own way
        fault = f"{type(error).__name__} {first_line(error)}"
    if fault is not None:
        raise CheckpointError(f"{checkpoint.folder}: rope_parameters cannot be used: {fault}")
    return network


def _rotary_fault(network: Any) -> str | None:
    """Turns a head near and far: some kinds of scaling look at their values when it is far enough."""
    # A copy, since some remember how far they have been.
    rotary, width = copy.deepcopy(network.prepare_rotary()), network.config.head_dim
    like = torch.zeros(1, 1, width, device=rotary.inv_freq.device)
    for position in (0, _FAR):
        for part in rotary(like, torch.tensor([[position]], device=like.device)):
            if part.shape[-1] != width:
                return f"expected heads turned whole, {width} numbers, found {part.shape[-1]} of them turned"
            if not bool(torch.isfinite(part).all()):
                return f"position {position} is turned by something that is not finite"
    return None
