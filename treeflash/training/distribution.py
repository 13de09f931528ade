"""One process, several with a copy of the weights each, or several that share them out (FSDP2)."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from treeflash.errors import InputError, TreeflashError
from treeflash.trainable import Trainable


def start_process(device: str, *, shard: bool) -> tuple[Accelerator, str]:
    """Finds out what this process is one of.

    Args:
        device: What the recipe says; "auto" is a GPU of this process's own when there is one.
        shard: Whether weights are to be shared out over processes.

    Returns:
        The accelerator, and the device to put the target on.

    Raises:
        InputError: For a launch that cannot be used.
    """
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    accelerator = Accelerator(cpu=on_cpu, mixed_precision="no")
    kinds = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
    if accelerator.distributed_type not in kinds:
        raise InputError(
            f"expected a plain launch (torchrun, and train.shard = true to share weights out), found "
            f"{accelerator.distributed_type.value}"
        )
    if device not in ("auto", "cpu") and accelerator.num_processes > 1:
        raise InputError(f'target.device: expected "auto" or "cpu" for several processes, found {device!r}')
    if shard and accelerator.num_processes == 1:
        raise InputError("train.shard: expected several processes, found one; start them with torchrun")
    if device != "auto":
        return accelerator, device
    return accelerator, "cpu" if on_cpu else str(accelerator.device)


def by_the_first(accelerator: Accelerator, task: Callable[[], object]) -> None:
    """Lets the first process do something that the others wait for.

    Args:
        accelerator: Of this process.
        task: What it does.

    Raises:
        TreeflashError: What the task raised, in all processes: none waits for one that is gone.
    """
    faults: list[TreeflashError | None] = [None]
    if accelerator.is_main_process:
        try:
            task()
        except TreeflashError as error:
            faults = [error]
    if accelerator.num_processes > 1:
        broadcast_object_list(faults)
    if faults[0] is not None:
        raise faults[0]


def distribute(trainable: Trainable, accelerator: Accelerator, *, shard: bool) -> Any:
    """Makes a trainable ready for its processes.

    Args:
        trainable: The trainable; sharded in place.
        accelerator: Of this process.
        shard: Share weights, gradients and the optimizer's memory out; they are gathered for each pass.

    Returns:
        What to call in its place.
    """
    if not shard:
        # It is where the target is.
        return accelerator.prepare(trainable, device_placement=[False])
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


def settle(model: Any) -> None:
    """Lets go of weights that were gathered for a pass, so that what they are next is taken up anew."""
    if isinstance(model, FSDPModule):
        model.reshard()


def passes_of_all(model: Any, mine: int, accelerator: Accelerator) -> int:
    """How many passes this process takes part in, in a step.

    Args:
        model: From `distribute`.
        mine: Passes it has rows for.
        accelerator: Of this process.

    Returns:
        The most that any process has, where weights are gathered for each pass by all together.
    """
    if not isinstance(model, FSDPModule):
        return mine
    count = torch.tensor([mine], device=accelerator.device)
    return int(accelerator.gather(count).max())


def summed(value: Tensor, accelerator: Accelerator) -> Tensor:
    """A tensor's sum over all processes."""
    if accelerator.num_processes == 1:
        return value
    total: Tensor = accelerator.reduce(value, "sum")
    return total
