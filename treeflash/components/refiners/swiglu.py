"""TreeFlash's refiner: a SwiGLU layer that sees the previous token."""

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from treeflash.checkpoints.reader import Checkpoint
from treeflash.components.refiners.trained import HiddenRefiner, per_source, reset_weights
from treeflash.layouts import Linear
from treeflash.target_interface import Target

_NORM_EPS = 1e-6


class SwiGluNetwork(nn.Module):
    """Weights of the layer.

    Args:
        hidden: D.
        intermediate: I.
        history: Tokens seen.
    """

    def __init__(self, hidden: int, intermediate: int, history: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=_NORM_EPS)
        self.ug = Linear((history + 1) * hidden, 2 * intermediate)
        self.d = Linear(intermediate, hidden, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """Gives the weights their first values; the layer adds nothing at first."""
        reset_weights(self, generator, zero="d.weight")


@attrs.define(eq=False)
class SwiGlu(HiddenRefiner):
    """Adds `d(silu(gate) * up)` of the previous token's embedding and the hidden state.

    Source: TreeFlash, AR approximation (arXiv:2606.03819).
    """

    layout: ClassVar[str] = "swiglu"

    @classmethod
    def make_network(cls, checkpoint: Checkpoint, target: Target) -> nn.Module:
        """Takes the width from the config's `intermediate_size`."""
        return SwiGluNetwork(target.hidden_size, checkpoint.config["intermediate_size"], cls.history)

    @classmethod
    def fresh_network(cls, options: Any, target: Target, intermediate_size: int) -> nn.Module:
        """Is as wide as the drafter's own layers, since a config has one width for both."""
        return SwiGluNetwork(target.hidden_size, intermediate_size, cls.history)

    def correction(self, embedded: Tensor, normed: Tensor, slots: Tensor | slice) -> Tensor:
        """Runs the layer."""
        network = self.network
        both = per_source(network.ug, network.norm(embedded), normed, slots)
        up, gate = both.chunk(2, dim=-1)
        out: Tensor = network.d(functional.silu(gate) * up)
        return out
