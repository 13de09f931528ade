"""The built-in parts, registered like any plugin's.

Each hook imports what it adds, so that commands that need no component start without torch.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from treeflash.hookspecs import hookimpl

if TYPE_CHECKING:
    from treeflash.interfaces import Drafter, Refiner, Selector, TreeBuilder, Verifier
    from treeflash.trainable import Loss, Trainable


@hookimpl
def treeflash_drafters() -> "dict[str, type[Drafter]]":
    """The drafters."""
    from treeflash.components.drafters.dflash import DFlash
    from treeflash.components.drafters.draft_model import DraftModel
    from treeflash.components.drafters.none import NoDrafter

    return {"dflash": DFlash, "draft-model": DraftModel, "none": NoDrafter}


@hookimpl
def treeflash_builders() -> "dict[str, type[TreeBuilder]]":
    """The tree builders."""
    from treeflash.components.builders.frontier import Frontier
    from treeflash.components.builders.marginal import Marginal
    from treeflash.components.builders.top_m import TopM

    return {"frontier": Frontier, "marginal": Marginal, "top-m": TopM}


@hookimpl
def treeflash_refiners() -> "dict[str, type[Refiner]]":
    """The refiners."""
    from treeflash.components.refiners.bilinear import Bilinear
    from treeflash.components.refiners.linear import Linear
    from treeflash.components.refiners.none import NoRefiner
    from treeflash.components.refiners.swiglu import SwiGlu
    from treeflash.components.refiners.two_token import TwoToken

    return {
        "bilinear": Bilinear,
        "linear": Linear,
        "none": NoRefiner,
        "swiglu": SwiGlu,
        "two-token": TwoToken,
    }


@hookimpl
def treeflash_selectors() -> "dict[str, type[Selector]]":
    """The selectors."""
    from treeflash.components.selectors.chain import Chain
    from treeflash.components.selectors.cost_aware import CostAware
    from treeflash.components.selectors.opt_tree import OptTree

    return {"chain": Chain, "cost-aware": CostAware, "opt-tree": OptTree}


@hookimpl
def treeflash_verifiers() -> "dict[str, type[Verifier]]":
    """The verifiers."""
    from treeflash.components.verifiers.sdpa_tree import SdpaTree

    return {"sdpa-tree": SdpaTree}


@hookimpl
def treeflash_trainables() -> "dict[str, type[Trainable]]":
    """The ways to train."""
    from treeflash.components.trainables.dflash import DFlashTrainable

    return {"dflash": DFlashTrainable}


@hookimpl
def treeflash_losses() -> "dict[str, type[Loss]]":
    """The losses."""
    from treeflash.components.losses.cross_entropy import CrossEntropy
    from treeflash.components.losses.forward_kl import ForwardKl
    from treeflash.components.losses.total_variation import TotalVariation

    return {"cross-entropy": CrossEntropy, "forward-kl": ForwardKl, "total-variation": TotalVariation}


@hookimpl
def treeflash_recipes() -> Path:
    """The recipes: inside an installed package, or beside it in a source tree."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"
