"""From a checkpoint's sizes to a network on the target's device."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from treeflash.checkpoints.reader import Checkpoint
from treeflash.errors import CheckpointError, bullet_list, first_line
from treeflash.target_interface import Target

N = TypeVar("N", bound=nn.Module)


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
        network.prepare_rotary()
    except Exception as error:  # each kind of rotary scaling checks values in its own way
        fault = f"rope_parameters cannot be used: {type(error).__name__} {first_line(error)}"
        raise CheckpointError(f"{checkpoint.folder}: {fault}") from None
    return network
