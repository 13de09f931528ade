"""What a plugin can add, a hook per kind. The built-in parts are added through these hooks too.

Hooks for components are called when a component is needed, those for recipes by every command. A module with
hooks that imports its components inside them lets commands start, list and complete without torch.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from treeflash.interfaces import Drafter, Refiner, Selector, TreeBuilder, Verifier
    from treeflash.trainable import Loss, Trainable

PROJECT = "treeflash"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def treeflash_drafters() -> "Mapping[str, type[Drafter]]":  # type: ignore[empty-body]
    """Adds drafters.

    Returns:
        A component class for each name that a recipe may `use` in `[drafter]`.
    """


@hookspec
def treeflash_builders() -> "Mapping[str, type[TreeBuilder]]":  # type: ignore[empty-body]
    """Adds tree builders.

    Returns:
        A component class for each name that a recipe may `use` in `[builder]`.
    """


@hookspec
def treeflash_refiners() -> "Mapping[str, type[Refiner]]":  # type: ignore[empty-body]
    """Adds refiners.

    Returns:
        A component class for each name that a recipe may `use` in `[refiner]`.
    """


@hookspec
def treeflash_selectors() -> "Mapping[str, type[Selector]]":  # type: ignore[empty-body]
    """Adds selectors.

    Returns:
        A component class for each name that a recipe may `use` in `[selector]`.
    """


@hookspec
def treeflash_verifiers() -> "Mapping[str, type[Verifier]]":  # type: ignore[empty-body]
    """Adds verifiers.

    Returns:
        A component class for each name that a recipe may `use` in `[verifier]`.
    """


@hookspec
def treeflash_trainables() -> "Mapping[str, type[Trainable]]":  # type: ignore[empty-body]
    """Adds ways to train drafters.

    Returns:
        For each name that a training recipe may `use` in `[drafter]`, the class that trains that drafter.
    """


@hookspec
def treeflash_losses() -> "Mapping[str, type[Loss]]":  # type: ignore[empty-body]
    """Adds losses.

    Returns:
        A class for each name that a training recipe may `use` in `[loss]`.
    """


@hookspec
def treeflash_targets() -> Mapping[str, Callable[[], Path]]:  # type: ignore[empty-body]
    """Adds targets that need no hub.

    Returns:
        For each name that a recipe may give as `model` in `[target]`, a function that makes sure the
        model is on disk and returns its folder.
    """


@hookspec
def treeflash_recipes() -> Path:  # type: ignore[empty-body]
    """Adds recipes; files in a folder `studies` below are studies.

    Returns:
        A folder of TOML files, each found by its name without the ending.
    """
