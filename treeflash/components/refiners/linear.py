"""The ablation of the SwiGLU refiner: one linear map in its place."""

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from treeflash import layouts
from treeflash.checkpoints.reader import Checkpoint
from treeflash.components.refiners.trained import HiddenRefiner, per_source, reset_weights
from treeflash.target_interface import Target

_NORM_EPS = 1e-6


class LinearNetwork(nn.Module):
    """Weights of the map.

    Args:
        hidden: D.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=_NORM_EPS)
        self.linear = layouts.Linear(2 * hidden, hidden, bias=False)

    def reset(self, generator: torch.Generator) -> None:
        """Gives the weights their first values; the map adds nothing at first."""
        reset_weights(self, generator, zero="linear.weight")


@attrs.define(eq=False)
class Linear(HiddenRefiner):
    """Adds a linear map of the previous token's embedding and the hidden state."""

    layout: ClassVar[str] = "linear"

    @classmethod
    def make_network(cls, checkpoint: Checkpoint, target: Target) -> nn.Module:
        """Has no size of its own."""
        return LinearNetwork(target.hidden_size)

    @classmethod
    def fresh_network(cls, options: Any, target: Target, intermediate_size: int) -> nn.Module:
        """Has no size of its own."""
        return LinearNetwork(target.hidden_size)

    def correction(self, embedded: Tensor, normed: Tensor, slots: Tensor | slice) -> Tensor:
        """Applies the map."""
        network = self.network
        return per_source(network.linear, network.norm(embedded), normed, slots)
