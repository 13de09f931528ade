"""One process, several with a copy of the weights each, or several that share them out (FSDP2)."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from treeflash.errors import InputError
from treeflash.trainable import Trainable


def distribute(trainable: Trainable, accelerator: Accelerator, *, shard: bool) -> Any:
    """Makes a trainable ready for its processes.

    Args:
        trainable: The trainable; sharded in place.
        accelerator: Of this process.
        shard: Share weights, gradients and the optimizer's memory out; they are gathered for each pass.

    Returns:
        What to call in its place.

    Raises:
        InputError: When there is one process to share weights out over.
    """
    if not shard:
        return accelerator.prepare(trainable)
    if accelerator.num_processes == 1:
        raise InputError("train.shard: expected several processes, found one; start them with torchrun")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    fully_shard(trainable, mesh=mesh)
    register_fsdp_forward_method(trainable, "simulate")
    return trainable


def exchanging(model: Any, now: bool) -> AbstractContextManager[Any]:
    """For the passes of a step: whether processes exchange gradients behind this one.

    Args:
        model: From `distribute`.
        now: True for the last pass.

    Returns:
        A context for the pass.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    alone = now or not hasattr(model, "no_sync")
    return nullcontext() if alone else model.no_sync()


def whole(value: Any) -> Any:
    """A tensor that may be spread over processes, gathered."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def summed(value: Tensor, accelerator: Accelerator) -> Tensor:
    """A tensor's sum over all processes."""
    if accelerator.num_processes == 1:
        return value
    total: Tensor = accelerator.reduce(value, "sum")
    return total
