"""EAGLE-3 for treeflash: the drafter, its training, and recipes."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from treeflash.hookspecs import hookimpl

if TYPE_CHECKING:
    from treeflash_eagle3.drafter import Eagle3
    from treeflash_eagle3.trainable import Eagle3Trainable

__all__ = ["treeflash_drafters", "treeflash_recipes", "treeflash_trainables"]


@hookimpl
def treeflash_drafters() -> "Mapping[str, type[Eagle3]]":
    """Adds the drafter.

    Returns:
        Its class by the name that recipes `use`.
    """
    from treeflash_eagle3.drafter import Eagle3  # and with it torch

    return {"eagle3": Eagle3}


@hookimpl
def treeflash_trainables() -> "Mapping[str, type[Eagle3Trainable]]":
    """Adds the drafter's training.

    Returns:
        Its class by the drafter's name.
    """
    from treeflash_eagle3.trainable import Eagle3Trainable

    return {"eagle3": Eagle3Trainable}


@hookimpl
def treeflash_recipes() -> Path:
    """Adds the recipes.

    Returns:
        Their folder.
    """
    return Path(__file__).parent / "recipes"
