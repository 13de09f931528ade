"""The built-in parts, registered like any plugin's."""

from pathlib import Path

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.drafters.draft_model import DraftModel
from treeflash.components.drafters.none import NoDrafter
from treeflash.components.losses.cross_entropy import CrossEntropy
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.components.losses.total_variation import TotalVariation
from treeflash.components.refiners.bilinear import Bilinear
from treeflash.components.refiners.linear import Linear
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.cost_aware import CostAware
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.trainables.dflash import DFlashTrainable
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.hookspecs import hookimpl
from treeflash.interfaces import Drafter, Refiner, Selector, TreeBuilder, Verifier
from treeflash.trainable import Loss, Trainable


@hookimpl
def treeflash_drafters() -> dict[str, type[Drafter]]:
    """The drafters."""
    return {"dflash": DFlash, "draft-model": DraftModel, "none": NoDrafter}


@hookimpl
def treeflash_builders() -> dict[str, type[TreeBuilder]]:
    """The tree builders."""
    return {"frontier": Frontier, "marginal": Marginal, "top-m": TopM}


@hookimpl
def treeflash_refiners() -> dict[str, type[Refiner]]:
    """The refiners."""
    return {
        "bilinear": Bilinear,
        "linear": Linear,
        "none": NoRefiner,
        "swiglu": SwiGlu,
        "two-token": TwoToken,
    }


@hookimpl
def treeflash_selectors() -> dict[str, type[Selector]]:
    """The selectors."""
    return {"chain": Chain, "cost-aware": CostAware, "opt-tree": OptTree}


@hookimpl
def treeflash_verifiers() -> dict[str, type[Verifier]]:
    """The verifiers."""
    return {"sdpa-tree": SdpaTree}


@hookimpl
def treeflash_trainables() -> dict[str, type[Trainable]]:
    """The ways to train."""
    return {"dflash": DFlashTrainable}


@hookimpl
def treeflash_losses() -> dict[str, type[Loss]]:
    """The losses."""
    return {"cross-entropy": CrossEntropy, "forward-kl": ForwardKl, "total-variation": TotalVariation}


@hookimpl
def treeflash_recipes() -> Path:
    """The recipes: inside an installed package, or beside it in a source tree."""
    package = Path(__file__).parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"
