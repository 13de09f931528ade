"""Reading hidden states out of a forward pass: hooks on the layers asked for, and on no other."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def find_decoder(model: PreTrainedModel) -> Any:
    """Finds a model without its head.

    Args:
        model: The model.

    Returns:
        The decoder; some families call their output head so.
    """
    decoder = model.get_decoder()
    return model.base_model if decoder is model.get_output_embeddings() else decoder


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList | None:
    """Finds a model's stack of decoder layers.

    Args:
        decoder: The model without its head.
        count: How many layers it has.

    Returns:
        The stack; None when there is no list of that many modules.
    """
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return None


@contextmanager
def tapped(decoder: nn.Module, layers: Sequence[nn.Module | None]) -> Iterator[list[Tensor]]:
    """Records outputs while a forward runs.

    Args:
        decoder: The model without its head.
        layers: Layers to record; None stands for the decoder's own output, behind its final norm.

    Yields:
        A list that holds, after the forward, one `[B, n, D]` per layer, in the order asked for.
    """
    outputs: dict[int, Tensor] = {}
    recorded: list[Tensor] = []

    def record(slot: int, output: Any) -> None:
        outputs[slot] = output if isinstance(output, torch.Tensor) else output[0]

    handles = [
        (decoder if layer is None else layer).register_forward_hook(
            lambda module, args, output, slot=slot: record(slot, output)
        )
        for slot, layer in enumerate(layers)
    ]
    try:
        yield recorded
        recorded.extend(outputs[slot] for slot in range(len(layers)))
    finally:
        for handle in handles:
            handle.remove()
