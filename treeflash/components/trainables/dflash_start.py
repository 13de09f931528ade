"""Where a backbone's weights come from before training: a checkpoint, the target's last layers, or a draw."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs.validators import ge, in_, optional
from torch import nn
from torch.nn import functional
from transformers import Qwen3Config

from treeflash.checkpoints.dflash_layout import DFlashFacts, config_of_network, open_for, read_facts
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.components.refiners.trained import TrainedRefiner
from treeflash.errors import CompositionError, bullet_list
from treeflash.trainable import TrainContext, TrainingTarget

_SCRATCH, _TARGET = "scratch", "target"
_BLOCK_SIZE, _LAYERS = 16, 5


@attrs.frozen
class DFlashSizes:
    """The backbone's shape, and where its weights start.

    Attributes:
        checkpoint: Folder or hub name of a checkpoint to start from, which then says the shape.
        start: Without one, "scratch" for small random weights, or "target" for the target's last layers.
        block_size: The anchor and the drafted positions; 16 when not given.
        layers: Of the drafter; 5 when not given.
        intermediate_size: Width of the SwiGLU layers; the target's when not given.
        attention_heads: The target's when not given.
        key_value_heads: The target's when not given.
        head_dim: The target's when not given.
        target_layer_ids: Layers whose outputs are the context, 0-based; when not given, up to 5 spread evenly
            from the second to the third from last.
        mask_token_id: Fills the positions to draft: best a token that texts do not hold. Required without a
            checkpoint.
    """

    checkpoint: str | None = None
    start: str = attrs.field(default=_SCRATCH, validator=in_((_SCRATCH, _TARGET)))
    block_size: int | None = attrs.field(default=None, validator=optional(ge(2)))
    layers: int | None = attrs.field(default=None, validator=optional(ge(1)))
    intermediate_size: int | None = attrs.field(default=None, validator=optional(ge(1)))
    attention_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    key_value_heads: int | None = attrs.field(default=None, validator=optional(ge(1)))
    head_dim: int | None = attrs.field(default=None, validator=optional(ge(2)))
    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = attrs.field(default=None, validator=optional(ge(0)))


@attrs.frozen(eq=False)
class Start:
    """A backbone as training finds it.

    Attributes:
        network: The weights, float32 on the target's device.
        config: What its checkpoint's config says, key for key where there is a checkpoint.
        facts: The same, checked.
    """

    network: DFlashNetwork
    config: dict[str, Any]
    facts: DFlashFacts


def start_network(
    sizes: DFlashSizes,
    target: TrainingTarget,
    locate: Callable[[str], Path],
    generator: torch.Generator,
) -> Start:
    """Makes the backbone that training starts with.

    Args:
        sizes: Its shape.
        target: The target.
        locate: Finds checkpoints.
        generator: Of the draws.

    Returns:
        The backbone.

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
        folder = locate(sizes.checkpoint)
        checkpoint, facts, _ = open_for(folder, target)
        return Start(DFlash.from_checkpoint(folder, target).network.float(), checkpoint.config, facts)
    ids, mask, block = _context(sizes, target)
    network = _fresh(sizes, target, len(ids), generator)
    config = config_of_network(network.config, target.fingerprint(), ids, mask, block)
    made, faults = read_facts(config, target.fingerprint())
    if faults or made is None:
        raise CompositionError(bullet_list("the drafter cannot be made for this target", faults))
    return Start(network, config, made)


def _context(sizes: DFlashSizes, target: TrainingTarget) -> tuple[list[int], int, int]:
    """Target layers, mask token and block size, checked."""
    ids, faults = sizes.target_layer_ids, []
    if ids is None:
        first = min(1, target.num_layers - 1)
        last = max(first, target.num_layers - 3)
        ids = sorted(set(torch.linspace(first, last, min(5, last - first + 1)).long().tolist()))
    if not ids or any(not 0 <= layer < target.num_layers for layer in ids):
        faults.append(f"drafter.target_layer_ids: expected layers 0..{target.num_layers - 1}, found {ids}")
    mask = sizes.mask_token_id
    if mask is None or mask >= target.vocab_size:
        found = "nothing" if mask is None else mask
        faults.append(f"drafter.mask_token_id: expected a token id below {target.vocab_size}, found {found}")
    if faults or mask is None:
        raise CompositionError(bullet_list("the drafter cannot be made for this target", faults))
    return ids, mask, sizes.block_size or _BLOCK_SIZE


def _fresh(
    sizes: DFlashSizes, target: TrainingTarget, taps: int, generator: torch.Generator
) -> DFlashNetwork:
    facts, model, layers = target.fingerprint(), target.config, sizes.layers or _LAYERS

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
        num_hidden_layers=layers,
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
        _copy_layers(network, list(target.layers)[-layers:], layers)
    return network


def _copy_layers(network: DFlashNetwork, layers: list[nn.Module], wanted: int) -> None:
    """Takes over every weight of the target's last layers that has a place in the drafter's."""
    faults = [] if len(layers) == wanted else [f"drafter.layers: the target has {len(layers)} to copy"]
    faults += [fault for layer in layers for fault in _odd_norms(layer)]
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


def _odd_norms(layer: nn.Module) -> list[str]:
    """Norms that are none of the drafter's kind (Gemma's scales by one plus its weight)."""
    faults = []
    for name in ("input_layernorm", "post_attention_layernorm"):
        norm: Any = getattr(layer, name, None)
        if norm is None:
            continue
        states = torch.linspace(-1, 1, norm.weight.shape[0], device=norm.weight.device)[None]
        plain = functional.rms_norm(states, norm.weight.shape, norm.weight.float(), eps=1e-6)
        if not torch.allclose(norm(states.to(norm.weight.dtype)).float(), plain, atol=0.05, rtol=0.05):
            faults.append(f"{name}: expected a plain RMS norm, found {type(norm).__name__}")
    return faults


def start_refiner(
    kind: type[TrainedRefiner],
    context: TrainContext,
    drafter_checkpoint: str | None,
    config: Mapping[str, Any],
) -> TrainedRefiner:
    """Makes the refiner that training starts with.

    Args:
        kind: Its class.
        context: Of the training.
        drafter_checkpoint: Of a drafter, whose refiner is gone on with if it is of this kind.
        config: The backbone's config.

    Returns:
        The refiner, float32 on the target's device: the one in its own checkpoint, or in the backbone's if
        that has one of its kind, or one that changes nothing yet.

    Raises:
        TreeflashError: When a checkpoint's does not go with the backbone.
    """
    target, options = context.target, context.refiner_options
    fresh = kind.fresh(options, target, config["intermediate_size"], context.generator)
    place = getattr(options, "checkpoint", None)
    if place is None and drafter_checkpoint is not None:
        _, facts, _ = open_for(context.locate(drafter_checkpoint), target)
        place = drafter_checkpoint if facts.refiner == kind.layout else None
    if place is None:
        return fresh
    refiner = kind.from_checkpoint(context.locate(place), target)
    found, wanted = (part.network.state_dict() for part in (refiner, fresh))
    faults = [
        f"{name}: expected shape {list(weight.shape)}, found {list(found[name].shape)}"
        for name, weight in wanted.items()
        if found[name].shape != weight.shape
    ]
    if faults:
        raise CompositionError(bullet_list(f"the refiner in {place} does not go with this drafter", faults))
    refiner.network.float()
    return refiner
