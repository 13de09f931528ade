"""What a DFlash or TreeFlash config says, and whether it can belong to a target."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.checkpoints.config_keys import (
    Kinds,
    nested,
    number_faults,
    shown,
    window_faults,
    wrong_types,
)
from treeflash.checkpoints.dflash_kinds import REFINER_TABLE, TABLE, odd_layers, other_kinds, refuse_dflash_2
from treeflash.checkpoints.reader import Checkpoint
from treeflash.checkpoints.rope import rope_faults, rope_parameters, rope_theta
from treeflash.errors import CheckpointError, bullet_list
from treeflash.target_interface import Target, TargetFacts

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
)

# Far above any block that was trained, and few enough to draft.
_MOST_SLOTS = 1024


@attrs.frozen
class DFlashFacts:
    """A checked config.

    Attributes:
        network: The keys that size the network, in Qwen3's terms.
        block_size: Anchor and drafted positions.
        mask_token_id: Fills the positions to draft.
        target_layer_ids: 0-based target layers whose outputs are the context.
        num_target_layers: Layers of the target it was made for, None when the file does not say.
        vocab_size: Of that target, None when the file does not say.
        refiner: Name of the refiner in the same file, None when there is none.
    """

    network: Mapping[str, Any] = attrs.field(repr=False)
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    vocab_size: int | None
    refiner: str | None

    def misfits(self, target: TargetFacts) -> list[str]:
        """Compares with a target.

        Args:
            target: Its sizes.

        Returns:
            One sentence per contradiction.
        """
        config = {
            **self.network,
            "num_target_layers": self.num_target_layers,
            "vocab_size": self.vocab_size,
        }
        return _misfits(config, self.mask_token_id, self.target_layer_ids, target)


def _misfits(
    config: Mapping[str, Any], mask: int | None, layers: Sequence[int] | None, target: TargetFacts
) -> list[str]:
    """Contradictions between what a config says, as far as it says it, and a target."""
    faults = []

    def compare(key: str, found: Any, expected: Any) -> None:
        if None not in (found, expected) and found != expected:
            faults.append(f"{key}: expected the target's {expected}, found {found}")

    compare("hidden_size", config.get("hidden_size"), target.hidden_size)
    compare("num_target_layers", config.get("num_target_layers"), target.num_layers)
    theta = rope_theta(config)
    if target.rope_theta is not None and theta is None:
        faults.append(f"rope_theta: expected the target's {target.rope_theta}, found nothing")
    compare("rope_theta", theta, target.rope_theta)
    vocabulary = config.get("vocab_size")
    if isinstance(vocabulary, int) and not same_vocabulary(vocabulary, target.vocab_size):
        compare("vocab_size", vocabulary, target.vocab_size)
    beyond = [layer for layer in layers or () if not 0 <= layer < target.num_layers]
    if beyond:
        faults.append(f"target_layer_ids: expected layers 0..{target.num_layers - 1}, found {beyond}")
    if mask is not None and mask >= target.vocab_size:
        faults.append(f"mask_token_id: expected a token id below {target.vocab_size}, found {mask}")
    return faults


def same_vocabulary(drafter: int, target: int) -> bool:
    """Whether two sizes are one vocabulary, padded differently (151,936 and 152,064, for instance).

    Args:
        drafter: Tokens that a drafter's config names.
        target: Tokens of the target.
    """
    return abs(drafter - target) * 200 < max(drafter, target)


def open_for(folder: Path | str, target: Target) -> tuple[Checkpoint, DFlashFacts, list[str]]:
    """Opens a checkpoint for a target.

    Args:
        folder: With `config.json` and safetensors.
        target: The target it is to draft for.

    Returns:
        The checkpoint, what its config says, and every fault found so far.

    Raises:
        CheckpointError: When the folder cannot be read, or its config says too little to size the network.
    """
    checkpoint = Checkpoint.open(Path(folder))
    refuse_dflash_2(checkpoint)
    facts, faults = read_facts(checkpoint.config, target.fingerprint())
    if facts is None:
        raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults))
    return checkpoint, facts, faults


def read_facts(config: Mapping[str, Any], target: TargetFacts) -> tuple[DFlashFacts | None, list[str]]:
    """Reads a config for a target.

    Args:
        config: The checkpoint's `config.json`.
        target: Sizes of the target it is to draft for.

    Returns:
        What it says, or None when that is too little to size the network; and every fault found, a
        sentence each.
    """
    faults = other_kinds(config)
    inner = nested(config, TABLE, faults)
    refiner = _refiner(config, faults)

    def integer(place: Mapping[str, Any], key: str, least: int, where: str = "") -> int | None:
        value = place.get(key)
        if type(value) is not int or value < least:
            found = "nothing" if value is None else shown(value)
            faults.append(f"{where}{key}: expected an integer >= {least}, found {found}")
            return None
        return value

    sizes = {key: integer(config, key, 1) for key in _SIZES}
    either = {
        key: _stated(config, inner, key, faults)
        for key in ("block_size", "mask_token_id", "target_layer_ids")
    }
    block_size = integer(either, "block_size", 2)
    if block_size is not None and block_size > _MOST_SLOTS:
        faults.append(f"block_size: expected at most {_MOST_SLOTS}, found {block_size}")
    mask = integer(either, "mask_token_id", 0, f"{TABLE}.")
    layers = either["target_layer_ids"]
    if not (isinstance(layers, list) and layers and all(type(layer) is int for layer in layers)):
        found = "nothing" if layers is None else shown(layers)
        faults.append(
            f"{TABLE}.target_layer_ids: expected a list of layer numbers, found {found} "
            "(guessing them gives a wrong drafter without an error)"
        )
        layers = None
    if layers is not None:
        faults += odd_layers(config, inner, layers)
    faults += _odd_values(config)
    faults += _misfits(config, mask, layers, target)
    if block_size is None or mask is None or layers is None or None in sizes.values():
        return None, faults
    facts = DFlashFacts(
        network=_network(config),
        block_size=block_size,
        mask_token_id=mask,
        target_layer_ids=tuple(layers),
        num_target_layers=config.get("num_target_layers"),
        vocab_size=config.get("vocab_size"),
        refiner=refiner,
    )
    return facts, faults


def config_of_network(
    network: Any, target: TargetFacts, target_layer_ids: Sequence[int], mask_token_id: int, block_size: int
) -> dict[str, Any]:
    """What a checkpoint's config says of a network.

    Args:
        network: Its `Qwen3Config`.
        target: The target it drafts for.
        target_layer_ids: 0-based target layers whose outputs are the context.
        mask_token_id: Fills the positions to draft.
        block_size: Anchor and drafted positions.

    Returns:
        A config that `read_facts` reads.
    """
    return {
        "architectures": ["TreeFlashDraftModel"],
        "model_type": "qwen3",
        **{key: getattr(network, key) for key in (*_SIZES, "head_dim", "rms_norm_eps", "attention_bias")},
        "max_position_embeddings": network.max_position_embeddings,
        "rope_theta": rope_theta({"rope_parameters": network.rope_parameters}),
        "rope_parameters": dict(network.rope_parameters),
        "layer_types": ["full_attention"] * network.num_hidden_layers,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
    }


def network_keys(config: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What of a config sizes a network.

    Args:
        config: The config.
        keys: Those to take, where they are given.

    Returns:
        These, with `head_dim` and `rope_parameters`, whichever way the config states them.
    """
    network = {key: config[key] for key in keys if config.get(key) is not None}
    network.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return {**network, "rope_parameters": rope_parameters(config)}


def _odd_values(config: Mapping[str, Any]) -> list[str]:
    """Optional keys whose values cannot be used."""
    kinds: Kinds = {
        "head_dim": ((int,), "an integer"),
        "num_target_layers": ((int,), "an integer"),
        "vocab_size": ((int,), "an integer"),
        "max_position_embeddings": ((int,), "an integer"),
        "attention_bias": ((bool,), "true or false"),
    }
    faults = [*wrong_types(config, kinds), *rope_faults(config), *window_faults(config)]
    return faults + number_faults(config)


def _network(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = (*_SIZES, "head_dim", "rms_norm_eps", "attention_bias", "max_position_embeddings")
    return network_keys(config, keys)


def _stated(config: Mapping[str, Any], inner: Mapping[str, Any], key: str, faults: list[str]) -> Any:
    """A value from the top level, where older files have it, or `dflash_config`; the first of two."""
    found = [place[key] for place in (config, inner) if place.get(key) is not None]
    if len(found) == 2 and found[0] != found[1]:
        faults.append(
            f"{key}: expected one value, found {shown(found[0])} and, in {TABLE}, {shown(found[1])}"
        )
    return found[0] if found else None


def _refiner(config: Mapping[str, Any], faults: list[str]) -> str | None:
    """The refiner's name: nested in newer files, at the top level in older ones."""
    table = nested(config, REFINER_TABLE, faults)
    name = table.get("ar_approximation", config.get("ar_approximation"))
    if name is not None and not isinstance(name, str):
        faults.append(f"treeflash_config.ar_approximation: expected a name or null, found {name!r}")
        return None
    return name
