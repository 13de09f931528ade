"""Where a backbone's weights come from before training: a checkpoint, the target's last layers, or a draw."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs.validators import ge, in_, optional
from torch import nn
from transformers import Qwen3Config

from treeflash.checkpoints.dflash_layout import config_of_network
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.errors import CompositionError, bullet_list
from treeflash.trainable import TrainingTarget

_SCRATCH, _TARGET = "scratch", "target"


@attrs.frozen
class DFlashSizes:
    """The backbone's shape, and where its weights start.

    Attributes:
        checkpoint: Folder or hub name of a checkpoint to start from, which then says the shape.
        start: Without one, "scratch" for small random weights, or "target" for the target's last layers.
        block_size: The anchor and the drafted positions.
        layers: Of the drafter.
        intermediate_size: Width of the SwiGLU layers; the target's when not given.
        attention_heads: The target's when not given.
        key_value_heads: The target's when not given.
        head_dim: The target's when not given.
        target_layer_ids: Layers whose outputs are the context, 0-based; spread evenly over the target when
            not given: 5, or as many as it has layers.
        mask_token_id: Fills the positions to draft: best a token that texts do not hold.
    """

    checkpoint: str | None = None
    start: str = attrs.field(default=_SCRATCH, validator=in_((_SCRATCH, _TARGET)))
    block_size: int = attrs.field(default=16, validator=ge(2))
    layers: int = attrs.field(default=5, validator=ge(1))
    intermediate_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    attention_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    key_value_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    head_dim: int | None = attrs.field(default=None, validator=optional(ge(2)))
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = attrs.field(default=None, validator=optional(ge(0)))


def start_network(
    sizes: DFlashSizes,
    target: TrainingTarget,
    locate: Callable[[str], Path],
    generator: torch.Generator,
) -> tuple[DFlashNetwork, dict[str, Any]]:
    """Makes the backbone that training starts with.

    Args:
        sizes: Its shape.
        target: The target.
        locate: Finds checkpoints.
        generator: Of the draws.

    Returns:
        The network, float32 on the target's device, and its checkpoint's config.

    Raises:
        TreeflashError: When it cannot belong to the target.
    """
    if sizes.checkpoint is not None:
        given = [
            field.name
            for field in attrs.fields(DFlashSizes)
            if field.name != "checkpoint" and getattr(sizes, field.name) != field.default
        ]
        if given:
            raise CompositionError(
                f"drafter: the checkpoint says the shape: expected no {', '.join(given)} beside it"
            )
        drafter = DFlash.from_checkpoint(locate(sizes.checkpoint), target)
        facts = drafter.facts
        network = drafter.network.float()
        ids, mask, block = list(facts.target_layer_ids), facts.mask_token_id, facts.block_size
    else:
        ids, mask, block = _context(sizes, target)
        network = _fresh(sizes, target, len(ids), generator)
    return network, config_of_network(network.config, target.fingerprint(), ids, mask, block)


def _context(sizes: DFlashSizes, target: TrainingTarget) -> tuple[list[int], int, int]:
    """Target layers, mask token and block size, checked."""
    ids, faults = sizes.target_layer_ids, []
    if ids is None:
        last = max(1, target.num_layers - 3)
        count = min(5, target.num_layers)
        first = min(1, target.num_layers - 1)
        spread = torch.linspace(first, max(last, first), count).long().tolist()
        ids = sorted(set(spread))
    if not ids or any(not 0 <= layer < target.num_layers for layer in ids):
        faults.append(f"drafter.target_layer_ids: expected layers 0..{target.num_layers - 1}, found {ids}")
    mask = sizes.mask_token_id
    if mask is None or mask >= target.vocab_size:
        found = "nothing" if mask is None else mask
        faults.append(f"drafter.mask_token_id: expected a token id below {target.vocab_size}, found {found}")
    if faults or mask is None:
        raise CompositionError(bullet_list("the drafter cannot be made for this target", faults))
    return ids, mask, sizes.block_size


def _fresh(
    sizes: DFlashSizes, target: TrainingTarget, taps: int, generator: torch.Generator
) -> DFlashNetwork:
    facts, model = target.fingerprint(), target.config

    def of_target(name: str, otherwise: int) -> int:
        value = getattr(model, name, None)
        return otherwise if value is None else int(value)

    heads = sizes.attention_heads or of_target("num_attention_heads", 1)
    network_config = Qwen3Config(
        hidden_size=facts.hidden_size,
        intermediate_size=sizes.intermediate_size or of_target("intermediate_size", 4 * facts.hidden_size),
        num_attention_heads=heads,
        num_key_value_heads=sizes.key_value_heads or of_target("num_key_value_heads", heads),
        head_dim=sizes.head_dim or of_target("head_dim", facts.hidden_size // heads),
        num_hidden_layers=sizes.layers,
        rms_norm_eps=float(getattr(model, "rms_norm_eps", None) or 1e-6),
        max_position_embeddings=target.max_positions or 32768,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": facts.rope_theta or 10000.0},
    )
    if network_config.num_attention_heads % network_config.num_key_value_heads:
        raise CompositionError(
            f"drafter.key_value_heads: expected a divisor of the {heads} attention heads, "
            f"found {network_config.num_key_value_heads}"
        )
    with torch.device("meta"):
        network = DFlashNetwork(network_config, taps)
    network = network.to_empty(device=target.device).float()
    network.reset(generator)
    if sizes.start == _TARGET:
        _copy_layers(network, list(target.layers)[-sizes.layers :], sizes.layers)
    return network


def _copy_layers(network: DFlashNetwork, layers: list[nn.Module], wanted: int) -> None:
    """Takes over every weight of the target's last layers that has a place in the drafter's."""
    faults = [] if len(layers) == wanted else [f"drafter.layers: the target has {len(layers)} to copy"]
    for mine, theirs in zip(network.layers, layers, strict=False):
        found: Mapping[str, torch.Tensor] = theirs.state_dict()
        for name, weight in mine.named_parameters():
            if name in found and found[name].shape == weight.shape:
                weight.data.copy_(found[name])
            elif name not in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                shape = list(found[name].shape) if name in found else "no such weight"
                faults.append(f"{name}: expected shape {list(weight.shape)}, found {shape}")
    if faults:
        raise CompositionError(
            bullet_list(
                'drafter.start = "target": the target\'s layers have other shapes', sorted(set(faults))
            )
        )
