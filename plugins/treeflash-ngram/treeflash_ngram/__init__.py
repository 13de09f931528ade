"""N-gram drafting for treeflash: any target decodes faster, without training."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from treeflash.hookspecs import hookimpl

if TYPE_CHECKING:
    from treeflash.interfaces import Drafter

__all__ = ["treeflash_drafters", "treeflash_recipes"]


@hookimpl
def treeflash_drafters() -> "Mapping[str, type[Drafter]]":
    """Adds the drafter.

    Returns:
        Its class, by the name that recipes `use`.
    """
    from treeflash_ngram.drafter import Ngram  # and with it torch

    return {"ngram": Ngram}


@hookimpl
def treeflash_recipes() -> Path:
    """Adds the recipe.

    Returns:
        Its folder.
    """
    return Path(__file__).parent / "recipes"
