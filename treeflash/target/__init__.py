"""The target: a Hugging Face causal language model, read in trees."""

from treeflash.target.hugging_face import HuggingFaceTarget
from treeflash.target.loading import load_target, wrap_model

__all__ = ["HuggingFaceTarget", "load_target", "wrap_model"]
