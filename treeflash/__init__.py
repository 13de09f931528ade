"""Tree speculative decoding from interchangeable parts.

The text is exactly what the target alone would have written; only the time changes.
"""

from treeflash.engine import Decoder, Generation
from treeflash.errors import TreeflashError
from treeflash.recipe import load
from treeflash.target import HuggingFaceTarget, load_target, wrap_model

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "Generation",
    "HuggingFaceTarget",
    "TreeflashError",
    "load",
    "load_target",
    "wrap_model",
]
