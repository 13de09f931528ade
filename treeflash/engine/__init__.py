"""The loop: prefill, step, commit, stop."""

from treeflash.engine.decoder import Decoder
from treeflash.engine.generation import Emission, Generation

__all__ = ["Decoder", "Emission", "Generation"]
