"""N-gram drafting for treeflash: any target decodes faster, without training."""

from collections.abc import Mapping
from pathlib import Path

from treeflash.hookspecs import hookimpl
from treeflash.interfaces import Drafter
from treeflash_ngram.drafter import Ngram

__all__ = ["Ngram", "treeflash_drafters", "treeflash_recipes"]


@hookimpl
def treeflash_drafters() -> Mapping[str, type[Drafter]]:
    """Adds the drafter.

    Returns:
        Its class, by the name that recipes `use`.
    """
    return {"ngram": Ngram}


@hookimpl
def treeflash_recipes() -> Path:
    """Adds the recipe.

    Returns:
        Its folder.
    """
    return Path(__file__).parent / "recipes"
