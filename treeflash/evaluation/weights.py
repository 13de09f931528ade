"""Which weights an arm decodes with, so that what others measured is not taken for its own."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from treeflash.engine import Decoder
from treeflash.places import on_disk
from treeflash.plugins import KINDS, Registry
from treeflash.recipe import Recipe
from treeflash.training.shipping import RECORD

_PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.npz", "*.gguf")
# Files up to here are read whole; of larger ones so many pieces of so many bytes, beside the header.
_WHOLE = 256 * 2**20
_PIECES, _PIECE = 4096, 16 * 2**10


def weights_of(recipe: Recipe, registry: Registry) -> dict[str, str]:
    """Digests of the folders that a recipe's parts are read from.

    Args:
        recipe: The recipe; its decoder is built, so that what is on the hub is on the disk by now.
        registry: What is installed.

    Returns:
        By kind and key, `drafter.checkpoint` for instance, what `folder_digest` says.
    """
    found = {}
    for kind, part in recipe.parts.items():
        for key in ("checkpoint", "model"):
            revision = getattr(part.options, "revision", None)
            folder = _folder(getattr(part.options, key, None), key, registry, revision)
            if folder is not None:
                found[f"{kind}.{key}"] = folder_digest(folder)
    return found


def network_digests(decoder: Decoder) -> dict[str, str]:
    """Digests of the weights that a decoder's parts hold, for parts that were made in Python.

    Args:
        decoder: The decoder.

    Returns:
        By kind, as `drafter.network`, 16 hexadecimal digits.
    """
    found = {}
    for kind in KINDS:
        network = getattr(getattr(decoder, kind), "network", None)
        if isinstance(network, nn.Module):
            digest = hashlib.sha256()
            for name, weight in sorted(network.state_dict().items()):
                digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
                digest.update(weight.cpu().contiguous().flatten().view(torch.uint8).numpy())
            found[f"{kind}.network"] = digest.hexdigest()[:16]
    return found


def folder_digest(folder: Path) -> str:
    """A hash of what the files of a checkpoint or model hold.

    Args:
        folder: The folder.

    Returns:
        16 hexadecimal digits; of files of more than 256 MiB a sample is read, spread over all of it.
    """
    found = hashlib.sha256()
    for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern)}):
        if path.name != RECORD:  # how long a training took makes no other drafter
            found.update(f"{path.name} {path.stat().st_size}\n".encode())
            _add(path, found)
    return found.hexdigest()[:16]


def _add(path: Path, found: Any) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE:
            while part := file.read(2**20):
                found.update(part)
            return
        # A safetensors file begins with its header's length, in eight bytes.
        length = min(int.from_bytes(file.read(8), "little"), _WHOLE)
        found.update(file.read(length))
        for place in range(8, size, max(1, size // _PIECES)):
            file.seek(place)
            found.update(file.read(_PIECE))


def _folder(place: Any, key: str, registry: Registry, revision: str | None) -> Path | None:
    """Where a part's option lies on this disk; None when it names nothing there."""
    if not isinstance(place, str):
        return None
    provided = registry.target(place) if key == "model" else None
    folder = on_disk(place, key) if provided is None else provided
    if folder is not None:
        return folder
    from huggingface_hub import snapshot_download  # only for what is from the hub

    try:
        return Path(snapshot_download(place, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # an option of that name that is no place
        return None
