"""Tree speculative decoding from interchangeable parts.

The text is exactly what the target alone would have written; only the time changes.
"""

import importlib
from typing import TYPE_CHECKING, Any

from treeflash.errors import TreeflashError
from treeflash.version import __version__ as __version__

if TYPE_CHECKING:
    from treeflash.engine import Decoder, Generation
    from treeflash.evaluation.from_python import bench, evaluate
    from treeflash.recipe import load
    from treeflash.target import HuggingFaceTarget, load_target, wrap_model
    from treeflash.training.from_python import train

__all__ = [
    "Decoder",
    "Generation",
    "HuggingFaceTarget",
    "TreeflashError",
    "bench",
    "evaluate",
    "load",
    "load_target",
    "train",
    "wrap_model",
]

# What needs torch is imported when it is first asked for: the help of a command does without.
_HOMES = {
    "Decoder": "treeflash.engine",
    "Generation": "treeflash.engine",
    "HuggingFaceTarget": "treeflash.target",
    "bench": "treeflash.evaluation.from_python",
    "evaluate": "treeflash.evaluation.from_python",
    "load": "treeflash.recipe",
    "load_target": "treeflash.target",
    "train": "treeflash.training.from_python",
    "wrap_model": "treeflash.target",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
