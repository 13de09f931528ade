"""Writing a drafter's checkpoint: config and weights, in the DFlash or TreeFlash layout."""

import json
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
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        for name in ("model.safetensors", "config.json"):
            (folder / name).unlink(missing_ok=True)
        raise CheckpointError(f"{folder}: cannot be written ({error})") from None


def gathered(tensor: Tensor) -> Tensor:
    """A weight, brought together when training has spread it over processes.

    Args:
        tensor: Of any shape.

    Returns:
        The whole of it, without gradient.
    """
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()
