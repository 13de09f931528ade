"""Writing a drafter's checkpoint: config and weights, in the DFlash or TreeFlash layout."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from treeflash.checkpoints.reader import REFINER_PREFIX
from treeflash.errors import CheckpointError


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    backbone: nn.Module,
    refiner: nn.Module | None,
    dtype: torch.dtype,
) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        folder: Where to.
        config: The config.
        backbone: Its weights keep their names.
        refiner: Its weights get their prefix; None without one.
        dtype: Weights are stored in it; tables of ids or flags keep theirs.

    Raises:
        CheckpointError: When the disk does not take it.
    """
    weights = dict(backbone.state_dict())
    if refiner is not None:
        weights |= {f"{REFINER_PREFIX}{name}": tensor for name, tensor in refiner.state_dict().items()}
    stored = {
        name: gathered(tensor).to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in weights.items()
    }
    try:
        write_tensors(stored, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        for name in ("model.safetensors", "config.json"):
            (folder / name).unlink(missing_ok=True)
        raise CheckpointError(f"{folder}: cannot be written ({error})") from None


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file with the permissions that the umask gives, and makes sure it is on the disk.

    Args:
        tensors: On any device, of any layout.
        path: Where it goes.
        metadata: Of the file.

    Raises:
        OSError: When the disk does not take it.
        SafetensorError: When the disk does not take it.
    """
    path.touch()
    mode = path.stat().st_mode & 0o777
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(stored, path, metadata=None if metadata is None else dict(metadata))
    path.chmod(mode)  # the library makes its files private
    with path.open("rb") as file:
        os.fsync(file.fileno())


def gathered(tensor: Tensor) -> Tensor:
    """A weight, brought together when training has spread it over processes.

    Args:
        tensor: Of any shape.

    Returns:
        The whole of it, without gradient.
    """
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()
