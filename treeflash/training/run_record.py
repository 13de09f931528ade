"""What a run was begun with, so that it is resumed with the same settings."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from treeflash.checkpoints.writing import gathered
from treeflash.errors import InputError
from treeflash.files import write_atomically
from treeflash.training.folders import begin, flat, read_manifest, refuse_changes

RUN, ADJUSTED = "run.json", "adjusted.json"

# Nothing that is learned depends on these; the weights that a run starts with are compared themselves.
_FREE = (
    "target.model",
    "target.device",
    "target.lean",
    "target.compile",
    "drafter.checkpoint",
    "drafter.fresh_refiner",
    "refiner.checkpoint",
    "data.states_folder",
    "train.evaluate_every",
    "train.save_every",
    "train.keep",
    "train.tensorboard",
    "builder.",
    "selector.",
    "verifier.",
)
# These may be changed on the way, which is written down.
_ADJUSTABLE = ("train.steps", "optimizer.lr")


def begin_run(out: Path, tables: Mapping[str, Any], facts: Mapping[str, Any], step: int) -> None:
    """Begins a run's folder, or makes sure that what goes on there is the same run.

    Args:
        out: The folder.
        tables: The recipe.
        facts: What else the result depends on.
        step: Steps done already.

    Raises:
        InputError: When it was begun with other settings, or cannot be written.
    """
    settings = {
        key: value
        for key, value in flat(tables).items()
        if not key.startswith(_FREE) and key not in _ADJUSTABLE
    }
    adjustable = _adjustable(tables)
    begin(out, RUN, {**settings, **facts})
    path = out / ADJUSTED
    history = read_adjusted(out)
    if step and not history:
        raise InputError(f"{path}: expected the settings of the {step} steps that are done, found none")
    if not history or history[-1]["settings"] != adjustable:
        history.append({"from_step": step, "settings": adjustable})
        told = {"history": history, "sha256": _sum(history)}
        write_atomically(path, json.dumps(told, indent=1) + "\n")


def read_adjusted(out: Path) -> list[dict[str, Any]]:
    """The adjustable settings of a run, as they were changed on the way.

    Args:
        out: Its folder.

    Returns:
        `from_step` and `settings` of each; none of a run that has not begun.

    Raises:
        InputError: When they are not what was written.
    """
    path = out / ADJUSTED
    if not path.is_file():
        return []
    told = read_manifest(out, ADJUSTED, "the folder of a training run")
    history = told.get("history")
    if told.get("sha256") != _sum(history):
        raise InputError(f"{path}: not what was written; put it back as it was, or train into another folder")
    return list(history or ())


def refuse_adjusted(out: Path, tables: Mapping[str, Any]) -> None:
    """Makes sure that a run, where there is one, is not adjusted on the way.

    Args:
        out: Its folder.
        tables: The recipe.

    Raises:
        InputError: When the recipe would.
    """
    history = read_adjusted(out)
    if history:
        refuse_changes(out, history[-1]["settings"], _adjustable(tables))


def _adjustable(tables: Mapping[str, Any]) -> dict[str, Any]:
    settings = flat(tables)
    return {key: settings.get(key) for key in _ADJUSTABLE}


def _sum(history: Any) -> str:
    return hashlib.sha256(json.dumps(history, sort_keys=True).encode()).hexdigest()


def digest(module: nn.Module) -> str:
    """A hash of all weights of a module: 16 hexadecimal digits."""
    found = hashlib.sha256()
    for name, weight in sorted(module.state_dict().items()):
        found.update(name.encode())
        found.update(gathered(weight).cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
