"""Checkpoint folders for tests: the shipped tiny ones, changed and written anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import treeflash.testing

MODELS = Path(treeflash.testing.__file__).parent / "models"


@attrs.define
class CheckpointFiles:
    """What a checkpoint folder holds, to be changed before it is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def shipped(cls, name: str = "tiny-treeflash") -> Self:
        """A shipped checkpoint, its names without prefix."""
        folder = MODELS / name
        tensors = load_file(folder / "model.safetensors")
        return cls(
            json.loads((folder / "config.json").read_text(encoding="utf-8")),
            {key.removeprefix("model."): tensor for key, tensor in tensors.items()},
        )

    @classmethod
    def with_refiner(cls, layout: str, tensors: dict[str, Tensor], **config: Any) -> Self:
        """The shipped backbone with another refiner."""
        files = cls.shipped("tiny-dflash")
        files.config["treeflash_config"] = {"ar_approximation": layout, **config}
        files.tensors |= {f"ar_approximation.{name}": tensor for name, tensor in tensors.items()}
        return files

    def prefixed(self, prefix: str = "model.") -> Self:
        """The same with a prefix before every name."""
        tensors = {prefix + name: tensor for name, tensor in self.tensors.items()}
        return attrs.evolve(self, tensors=tensors)

    def write(self, folder: Path) -> Path:
        """Writes config and one file of weights."""
        self.write_config(folder)
        save_file(self.tensors, folder / "model.safetensors")
        return folder

    def write_shards(self, folder: Path, count: int = 3) -> Path:
        """Writes config, shards, and the index that names them."""
        self.write_config(folder)
        names = sorted(self.tensors)
        weight_map = {}
        for shard in range(count):
            file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
            held = {name: self.tensors[name] for name in names[shard::count]}
            save_file(held, folder / file)
            weight_map |= dict.fromkeys(held, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return folder

    def write_config(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")


def random_refiner(layout: str, rank: int = 8, scale: float = 0.1) -> dict[str, Tensor]:
    """Weights of a refiner of the tiny target's sizes, named as the formats name them."""
    hidden, vocabulary, width = 64, 128, 192
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    norm = {"norm.weight": 1 + random(hidden)}
    if layout == "linear":
        return {**norm, "linear.weight": random(hidden, 2 * hidden)}
    if layout == "bilinear":
        return {
            "predecessor.weight": random(vocabulary, rank) / scale,
            "projection.weight": random(rank, hidden),
            "projection.bias": random(rank),
            "successor.weight": random(vocabulary, rank) / scale,
        }
    seen = {"swiglu": 2, "two-token": 3}[layout]
    return {
        **norm,
        "ug.weight": random(2 * width, seen * hidden),
        "ug.bias": random(2 * width),
        "d.weight": random(hidden, width),
    }


@pytest.fixture(scope="session")
def checkpoint_files() -> type[CheckpointFiles]:
    return CheckpointFiles


@pytest.fixture(scope="session", name="random_refiner")
def random_refiner_fixture() -> Callable[..., dict[str, Tensor]]:
    return random_refiner
