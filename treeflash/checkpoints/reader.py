"""Opening a checkpoint folder: safetensors, one file or several, by section."""

import os
from pathlib import Path, PurePosixPath
from typing import Any, Self

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from treeflash.errors import CheckpointError, bullet_list
from treeflash.json_files import read_json
from treeflash.target_interface import Target

REFINER_PREFIX = "ar_approximation."
_OUTER_PREFIX = "model."
_FLOATS = ("BF16", "F16", "F32", "F64")
# Tables of ids or flags that lie beside the weights keep their dtype.
_TABLES = {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
# A config that contradicts its tensors contradicts most of them.
SHOWN_FAULTS = 8
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@attrs.frozen
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        file: Its safetensors file.
        key: Its name in that file.
        shape: Its shape.
        dtype: Its dtype, as safetensors spells it.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen
class Checkpoint:
    """A drafter's folder, its tensors sorted into sections; nothing is read until asked for.

    Attributes:
        folder: The folder.
        config: Its `config.json`.
        backbone: Tensors of the backbone by name, without the `model.` prefix some files have.
        refiner: Tensors of the refiner by name, without their prefix.
    """

    folder: Path
    config: dict[str, Any] = attrs.field(repr=False)
    backbone: dict[str, StoredTensor] = attrs.field(repr=False)
    refiner: dict[str, StoredTensor] = attrs.field(repr=False)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads a folder's config and the names and shapes of its tensors.

        Args:
            folder: With `config.json` and either `model.safetensors` or an index of shards.

        Returns:
            The checkpoint.

        Raises:
            CheckpointError: When a file is missing, broken or a pickle.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a checkpoint folder, found none")
        config = read_json(folder / "config.json", CheckpointError)
        backbone: dict[str, StoredTensor] = {}
        refiner: dict[str, StoredTensor] = {}
        twice = []
        for file in weight_files(folder):
            for stored in stored_tensors(file):
                name = stored.key.removeprefix(_OUTER_PREFIX)
                section = refiner if name.startswith(REFINER_PREFIX) else backbone
                name = name.removeprefix(REFINER_PREFIX)
                if name in section:
                    twice.append(f"tensor {stored.key} is stored twice")
                section[name] = stored
        if twice:
            raise CheckpointError(bullet_list(f"{folder}", twice))
        return cls(folder, config, backbone, refiner)

    def num_layers(self) -> int:
        """Layers of the backbone, counted by the tensors named `layers.N`."""
        return len({name.split(".")[1] for name in self.backbone if name.startswith("layers.")})

    def load(self, module: nn.Module, section: str) -> list[str]:
        """Fills a module with a section's tensors, if all of them fit.

        Args:
            module: Its parameters and persistent buffers, on any device, say what is expected: a shape, and
                any floating-point dtype for one that has such, its own for a table of ids or flags. They are
                replaced.
            section: "backbone" or "refiner".

        Returns:
            What does not fit, a sentence each; the module is filled only when there is nothing.
        """
        stored: dict[str, StoredTensor] = getattr(self, section)
        state: dict[str, Tensor] = module.state_dict()
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        prefix = REFINER_PREFIX if section == "refiner" else ""
        faults = [f"{section} tensor {prefix}{name} is missing" for name in expected.keys() - stored.keys()]
        faults += [
            f"{section} tensor {stored[name].key} is unknown" for name in stored.keys() - expected.keys()
        ]
        for name in expected.keys() & stored.keys():
            if stored[name].shape != expected[name]:
                faults.append(
                    f"{section} tensor {stored[name].key}: expected shape {list(expected[name])}, "
                    f"found {list(stored[name].shape)}"
                )
            dtypes = _FLOATS if state[name].is_floating_point() else (_TABLES[state[name].dtype],)
            if stored[name].dtype not in dtypes:
                wanted = dtypes[0] if len(dtypes) == 1 else f"one of {', '.join(dtypes)}"
                faults.append(
                    f"{section} tensor {stored[name].key}: expected {wanted}, found {stored[name].dtype}"
                )
        if faults:
            return sorted(faults)
        weights = self._read(stored)
        faults = [
            f"{section} tensor {stored[name].key} holds values that are not finite"
            for name, tensor in weights.items()
            if not bool(torch.isfinite(tensor).all())
        ]
        if not faults:
            module.load_state_dict(weights, assign=True)
            module.requires_grad_(False)
        return sorted(faults)

    def _read(self, stored: dict[str, StoredTensor]) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for file in {tensor.file for tensor in stored.values()}:
            with safe_open(file, framework="pt") as handle:
                for name, tensor in stored.items():
                    if tensor.file == file:
                        weights[name] = handle.get_tensor(tensor.key)
        return weights


def weight_misfits(module: nn.Module, target: Target) -> list[str]:
    """Compares where and in what precision weights are with a target's.

    Args:
        module: The weights.
        target: The target.

    Returns:
        One sentence per contradiction.
    """
    weights = list(module.parameters())
    dtypes, devices = {weight.dtype for weight in weights}, {weight.device for weight in weights}
    faults = []
    if dtypes - {target.dtype}:
        faults.append(f"weights: expected the target's {target.dtype}, found {', '.join(map(str, dtypes))}")
    if devices - {target.device}:
        faults.append(f"weights: expected the target's {target.device}, found {', '.join(map(str, devices))}")
    return faults


def weight_files(folder: Path) -> list[Path]:
    """Finds the files that hold a folder's weights.

    Args:
        folder: The folder.

    Returns:
        One file, or those that an index names.

    Raises:
        CheckpointError: When there are none, or only pickled ones, or an index names files that are not
            there or not in the folder.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: expected a table weight_map that names files, found none")
        outside = sorted({str(name) for name in weight_map.values() if not _is_inside(name)})
        if outside:
            raise CheckpointError(
                f"{index}: expected names of files inside the folder, found {', '.join(map(repr, outside))}"
            )
        files = sorted({folder / str(name) for name in weight_map.values()})
        # Path.is_file raises when a name is too long for the disk.
        missing = [file.name for file in files if not os.path.isfile(file)]
        if missing:
            raise CheckpointError(f"{index}: names files that are not there: {', '.join(missing)}")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder}: expected model.safetensors, found {', '.join(pickles)}; pickled weights can run "
            "code and are not read: load them where you trust them, and write them again with "
            "save_pretrained or safetensors.torch.save_file"
        )
    raise CheckpointError(
        f"{folder}: expected model.safetensors or model.safetensors.index.json, found neither"
    )


def _is_inside(name: Any) -> bool:
    """Whether a name is that of a file inside the folder it is seen from, on any system."""
    if not isinstance(name, str) or not name or set(name) & set("\\:\0"):
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def stored_tensors(file: Path) -> list[StoredTensor]:
    """Reads what a file says of its tensors, and none of them.

    Args:
        file: A safetensors file.

    Returns:
        The tensors.

    Raises:
        CheckpointError: When the file is damaged.
    """
    try:
        with safe_open(file, framework="pt") as handle:
            slices = {key: handle.get_slice(key) for key in handle.keys()}
            return [
                StoredTensor(file, key, tuple(part.get_shape()), part.get_dtype())
                for key, part in slices.items()
            ]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: not a readable safetensors file ({error}); was it written or copied to its end?"
        ) from None
