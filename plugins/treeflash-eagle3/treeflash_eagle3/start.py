"""The head that training starts with."""

from typing import Any

import attrs
import torch
from attrs.validators import ge, optional
from torch import Tensor
from transformers import LlamaConfig

from treeflash.errors import CompositionError, bullet_list
from treeflash.trainable import TrainContext, TrainingTarget
from treeflash_eagle3.layout import Eagle3Facts, layer_faults, usual_layers
from treeflash_eagle3.network import Eagle3Network

_VOCABULARY = 32000


@attrs.frozen
class Eagle3Sizes:
    """The head's shape.

    Attributes:
        draft_vocab_size: Tokens it can draft, the most frequent of the answers; all when there are no more.
        intermediate_size: Width of the SwiGLU layer; the target's when not given.
        attention_heads: The target's when not given.
        key_value_heads: The target's when not given.
        head_dim: The target's when not given.
    """

    draft_vocab_size: int = attrs.field(default=_VOCABULARY, validator=ge(1))
    intermediate_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    attention_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    key_value_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    head_dim: int | None = attrs.field(default=None, validator=optional(ge(2)))


def start_network(sizes: Eagle3Sizes, context: TrainContext) -> tuple[Eagle3Network, Eagle3Facts]:
    """Makes the head that training starts with.

    Args:
        sizes: Its shape.
        context: Of the training.

    Returns:
        The head, float32 on the target's device, and what a checkpoint's config says of it.

    Raises:
        CompositionError: When there can be no such head for the target.
    """
    target, model = context.target, context.target.config
    known = target.fingerprint()

    def of_target(name: str, otherwise: int) -> int:
        value = getattr(model, name, None)
        return otherwise if value is None else int(value)

    heads = sizes.attention_heads or of_target("num_attention_heads", 1)
    key_heads = sizes.key_value_heads or of_target("num_key_value_heads", heads)
    layers = usual_layers(known.num_layers)
    faults = layer_faults(layers, known.num_layers)
    if heads % key_heads:
        faults.append(
            f"drafter.key_value_heads: expected a divisor of the {heads} attention heads, found {key_heads}"
        )
    if faults:
        raise CompositionError(bullet_list("the drafter cannot be made for this target", faults))
    vocabulary = context.frequent(sizes.draft_vocab_size)
    network_sizes: dict[str, Any] = {
        "hidden_size": known.hidden_size,
        "intermediate_size": sizes.intermediate_size or of_target("intermediate_size", 4 * known.hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": 1,
        "head_dim": sizes.head_dim or of_target("head_dim", known.hidden_size // heads),
        "rms_norm_eps": float(getattr(model, "rms_norm_eps", None) or 1e-6),
        "max_position_embeddings": target.max_positions or 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": known.rope_theta or 10000.0},
    }
    with torch.device("meta"):
        network = Eagle3Network(LlamaConfig(**network_sizes), len(vocabulary), known.vocab_size)
    network = network.to_empty(device=target.device).float()
    network.reset(context.generator)
    network.draft_among(vocabulary)
    # The target's own output weights: from there the head learns many times faster than from a draw.
    network.lm_head.weight.data.copy_(_output_weights(target, vocabulary))
    return network, Eagle3Facts(network_sizes, len(vocabulary), known.vocab_size, layers)


@torch.no_grad()
def _output_weights(target: TrainingTarget, token_ids: Tensor) -> Tensor:
    """Weights of the target's output head, `[V', D]`: what it gives for each direction alone."""
    head = target.head(token_ids.to(target.device), torch.float32)
    directions = torch.eye(target.hidden_size, device=target.device)
    return (head(directions) - head(directions[:1] * 0)).T
