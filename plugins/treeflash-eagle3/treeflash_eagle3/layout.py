"""What the config of an EAGLE-3 checkpoint says, and whether it can belong to a target."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from treeflash.checkpoints.config_keys import (
    Kinds,
    Setting,
    nested,
    number_faults,
    odd_settings,
    shown,
    unknown_keys,
    window_faults,
    wrong_types,
)
from treeflash.checkpoints.dflash_layout import network_keys, same_vocabulary
from treeflash.checkpoints.rope import rope_faults, rope_theta
from treeflash.target_interface import TargetFacts
from treeflash_eagle3.network import NUM_TAPS

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "draft_vocab_size",
)
# Where heads that were not trained on the usual layers name theirs, by output and 0-based.
_TABLE, _LAYERS = "eagle_config", "eagle_aux_hidden_state_layer_ids"
_ELSEWHERE = f"{_TABLE}.{_LAYERS} names the target's layers"
_NORMED = "norms there are not supported"
# Of heads that share the layout, and of those of the first EAGLE.
_SETTINGS = {
    "norm_before_residual": Setting(False, "a normed residual is not supported"),
    "norm_before_fc": Setting(False, _NORMED),
    "fc_norm": Setting(False, _NORMED),
    "norm_output": Setting(False, "a normed state is not supported"),
    "use_aux_hidden_state": Setting(True, "a head that reads one layer alone is not supported"),
    "num_aux_hidden_states": Setting(NUM_TAPS, "no other number of layers is supported"),
    "use_input_layernorm_in_first_layer": Setting(True, "a token without a norm is not supported"),
    "use_last_layernorm": Setting(True, "a head without a final norm is not supported"),
    "use_mtp_layernorm": Setting(False, _NORMED),
    "parallel_drafting": Setting(False, "drafting in parallel is not supported"),
    "parallel_draft_step": Setting(1, "drafting in parallel is not supported"),
    "attention_bias": Setting(False, "biases are not supported"),
    "mlp_bias": Setting(False, "biases are not supported"),
    "target_layer_ids": Setting(None, _ELSEWHERE),
    "aux_hidden_state_layer_ids": Setting(None, _ELSEWHERE),
}
# Beside those, what heads of one layer do not have to look at.
_KEYS = (_LAYERS, "next_layer_regular", "parallel_draft_heads_num_layers", *_SETTINGS)
# Those layers' inputs are read, and the first is the one below the third layer.
_LEAST_LAYERS = 4
# What a Llama config without the key stands for.
_ROPE_THETA = 10000.0


@attrs.frozen
class Eagle3Facts:
    """A checked config.

    Attributes:
        network: The keys that size the layer, in Llama's terms.
        draft_vocab_size: Tokens the head can draft.
        vocab_size: Tokens of the target it was made for.
        target_layer_ids: 0-based target layers whose outputs are fused.
    """

    network: Mapping[str, Any] = attrs.field(repr=False)
    draft_vocab_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]

    def misfits(self, target: TargetFacts) -> list[str]:
        """Compares with a target.

        Args:
            target: Its sizes.

        Returns:
            One sentence per contradiction.
        """
        config = {**self.network, "vocab_size": self.vocab_size}
        return [*_misfits(config, target), *layer_faults(self.target_layer_ids, target.num_layers)]


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The target layers whose outputs a head is trained on when nothing else is said.

    The method names layers 2, n / 2 and n - 3 and reads what goes into them, which is what comes out of the
    layers below.

    Args:
        num_layers: Layers of the target, n.

    Returns:
        0-based layers, to be tapped at their outputs.
    """
    return (1, num_layers // 2 - 1, num_layers - 4)


def layer_faults(layers: Sequence[int], num_layers: int) -> list[str]:
    """Says what is wrong with target layers to be fused.

    Args:
        layers: 0-based.
        num_layers: Layers of the target.

    Returns:
        A sentence, or nothing.
    """
    if num_layers < _LEAST_LAYERS:
        return [f"the target: expected at least {_LEAST_LAYERS} layers, found {num_layers}"]
    # The last layer's output is tapped behind the target's final norm, where no public head was trained.
    if len(layers) == NUM_TAPS and all(0 <= layer < num_layers - 1 for layer in layers):
        return []
    expected = f"expected {NUM_TAPS} of the layers 0..{num_layers - 2}"
    return [f"{_TABLE}.{_LAYERS}: {expected}, found {list(layers)}"]


def read_facts(config: Mapping[str, Any], target: TargetFacts) -> tuple[Eagle3Facts | None, list[str]]:
    """Reads a config for a target.

    Args:
        config: The checkpoint's `config.json`.
        target: Sizes of the target it is to draft for.

    Returns:
        What it says, or None when that is too little to size the network; and every fault found, a
        sentence each.
    """
    faults: list[str] = []
    for key in _SIZES:
        value = config.get(key)
        if type(value) is not int or value < 1:
            found = "nothing" if value is None else repr(value)
            faults.append(f"{key}: expected an integer >= 1, found {found}")
    sized = not faults
    if sized and config["num_hidden_layers"] != 1:
        faults.append(f"num_hidden_layers: expected 1, found {config['num_hidden_layers']}")
    if sized and config["draft_vocab_size"] > config["vocab_size"]:
        faults.append(
            f"draft_vocab_size: expected at most the {config['vocab_size']} tokens of vocab_size, "
            f"found {config['draft_vocab_size']}"
        )
    faults += _odd_values(config)
    faults += _misfits(config, target)
    layers = _target_layers(config, target, faults)
    if not sized:
        return None, faults
    facts = Eagle3Facts(
        network=_network(config),
        draft_vocab_size=config["draft_vocab_size"],
        vocab_size=config["vocab_size"],
        target_layer_ids=layers,
    )
    return facts, faults


def config_of_network(network: Any, facts: Eagle3Facts) -> dict[str, Any]:
    """What a checkpoint's config says of a head on the usual layers.

    Args:
        network: Its `LlamaConfig`.
        facts: Of the head.

    Returns:
        A config that `read_facts` reads.
    """
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{key: getattr(network, key) for key in sizes},
        "num_hidden_layers": 1,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.draft_vocab_size,
        "max_position_embeddings": network.max_position_embeddings,
        "rms_norm_eps": network.rms_norm_eps,
        "rope_theta": rope_theta({"rope_parameters": network.rope_parameters}),
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def vocabulary_faults(target_ids: Tensor, in_draft: Tensor, vocab_size: int) -> list[str]:
    """Says what is wrong with a draft vocabulary.

    Args:
        target_ids: int64 `[V']`: the target's id of each token that can be drafted.
        in_draft: bool `[V]`: whether each of the target's tokens can be.
        vocab_size: Tokens of the target.

    Returns:
        One sentence per fault.
    """
    beyond = target_ids[(target_ids < 0) | (target_ids >= min(vocab_size, len(in_draft)))]
    if len(beyond):
        most = min(vocab_size, len(in_draft)) - 1
        return [f"d2t: expected target ids in 0..{most}, found {beyond[:3].tolist()} among them"]
    if len(set(target_ids.tolist())) < len(target_ids):
        return ["d2t: expected a target id for each draft token, found one that two of them share"]
    if int(in_draft.sum()) != len(target_ids) or not bool(in_draft[target_ids].all()):
        return ["t2d: expected true at the target ids of d2t and nowhere else"]
    return []


def _misfits(config: Mapping[str, Any], target: TargetFacts) -> list[str]:
    """Contradictions between sizes, as far as they are there, and a target.

    The base of the rotary positions is the head's own: it attends to nothing of the target's.
    """
    faults = []
    hidden, vocabulary = config.get("hidden_size"), config.get("vocab_size")
    if isinstance(hidden, int) and hidden != target.hidden_size:
        faults.append(f"hidden_size: expected the target's {target.hidden_size}, found {hidden}")
    if isinstance(vocabulary, int) and not same_vocabulary(vocabulary, target.vocab_size):
        faults.append(f"vocab_size: expected the target's {target.vocab_size}, found {vocabulary}")
    return faults


def _odd_values(config: Mapping[str, Any]) -> list[str]:
    """Optional keys whose values cannot be used."""
    kinds: Kinds = {
        "head_dim": ((int,), "an integer"),
        "max_position_embeddings": ((int,), "an integer"),
    }
    return [
        *wrong_types(config, kinds),
        *number_faults(config),
        *rope_faults(config),
        *window_faults(config),
        *odd_settings(config, (_TABLE,), _SETTINGS),
        *unknown_keys(config, _TABLE, _KEYS),
    ]


def _target_layers(config: Mapping[str, Any], target: TargetFacts, faults: list[str]) -> tuple[int, ...]:
    if config.get(_LAYERS) is not None:
        faults.append(
            f"{_LAYERS}: expected it inside {_TABLE}, found it outside, where some count inputs and some "
            "outputs"
        )
    stated = nested(config, _TABLE, faults).get(_LAYERS)
    layers = usual_layers(target.num_layers) if stated is None else stated
    if not (isinstance(layers, list | tuple) and all(type(layer) is int for layer in layers)):
        faults.append(f"{_TABLE}.{_LAYERS}: expected a list of layer numbers, found {shown(layers)}")
        return ()
    faults += layer_faults(layers, target.num_layers)
    return tuple(layers)


def _network(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = (*_SIZES[:5], "head_dim", "rms_norm_eps", "max_position_embeddings")
    network = network_keys(config, keys)
    network["rope_parameters"]["rope_theta"] = rope_theta(config) or _ROPE_THETA
    return network
