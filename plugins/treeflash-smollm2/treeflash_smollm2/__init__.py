"""SmolLM2-135M-Instruct for treeflash: a target without a hub, a drafter for it, and recipes."""

from collections.abc import Callable, Mapping
from pathlib import Path

from treeflash.hookspecs import hookimpl
from treeflash_smollm2.fetch import TARGET, local_model

__all__ = ["local_model", "treeflash_recipes", "treeflash_targets"]


@hookimpl
def treeflash_targets() -> Mapping[str, Callable[[], Path]]:
    """Adds the target.

    Returns:
        The function that fetches it on first use, by the name that recipes give as `model`.
    """
    return {TARGET: local_model}


@hookimpl
def treeflash_recipes() -> Path:
    """Adds the recipes.

    Returns:
        Their folder.
    """
    return Path(__file__).parent / "recipes"
