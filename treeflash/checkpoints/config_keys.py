"""Keys of a drafter's config: types, values under which it is another drafter, and names nobody knows."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from treeflash.errors import nearest

# By key, types that a value may have and what messages call them.
Kinds = Mapping[str, tuple[tuple[type, ...], str]]

_FULL = "full_attention"
_SHOWN = 200  # characters of a value


@attrs.frozen
class Setting:
    """A key by which drafters that are otherwise alike differ.

    Attributes:
        expected: The value of those that are read; without the key, or with null, a drafter is one of them.
        otherwise: What another value stands for, to end a message.
    """

    expected: Any
    otherwise: str


def wrong_types(config: Mapping[str, Any], kinds: Kinds) -> list[str]:
    """Optional keys whose values are of no type that they may have.

    Args:
        config: The config.
        kinds: By key, the types allowed and what messages call them.

    Returns:
        One sentence per fault.
    """
    return [
        f"{key}: expected {name}, found {config[key]!r}"
        for key, (allowed, name) in kinds.items()
        if config.get(key) is not None and type(config[key]) not in allowed
    ]


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0 that a float can hold."""
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def nested(config: Mapping[str, Any], key: str, faults: list[str]) -> Mapping[str, Any]:
    """A table inside a config.

    Args:
        config: The config.
        key: The table's.
        faults: Gets a sentence when it is something else.

    Returns:
        The table, empty when there is none.
    """
    value = config.get(key)
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return value
    faults.append(f"{key}: expected an object, found {shown(value)}")
    return {}


def odd_settings(
    config: Mapping[str, Any], tables: Sequence[str], settings: Mapping[str, Setting]
) -> list[str]:
    """Settings of a drafter that is not read, at the top level of a config or in a table of it.

    Args:
        config: The config.
        tables: Keys of its tables.
        settings: By key, those that matter.

    Returns:
        One sentence per fault.
    """
    places = {"": config} | {f"{table}.": nested(config, table, []) for table in tables}
    return [
        f"{where}{key}: expected {shown(setting.expected)}, found {shown(place[key])} ({setting.otherwise})"
        for where, place in places.items()
        for key, setting in settings.items()
        if place.get(key) is not None and not _same(place[key], setting.expected)
    ]


def unknown_keys(config: Mapping[str, Any], table: str, known: Sequence[str]) -> list[str]:
    """Keys of a table that mean nothing here, and so may mean anything.

    Args:
        config: The config.
        table: The table's key.
        known: Keys that it may have.

    Returns:
        One sentence per fault.
    """
    return [
        f"{table}.{key}: unknown, so it may say that this is another kind of drafter{nearest(key, known)}"
        for key in nested(config, table, [])
        if key not in known
    ]


def window_faults(config: Mapping[str, Any]) -> list[str]:
    """Says where layers would not see all that comes before.

    Args:
        config: With `layer_types`, or `sliding_window` and `use_sliding_window`.

    Returns:
        One sentence per fault.
    """
    layers, count = config.get("layer_types"), config.get("num_hidden_layers")
    uses, window = config.get("use_sliding_window"), config.get("sliding_window")
    if uses is not None and type(uses) is not bool:
        return [f"use_sliding_window: expected true or false, found {shown(uses)}"]
    if layers is not None:
        # These decide, whatever the other keys say.
        if not (isinstance(layers, list) and all(kind == _FULL for kind in layers)):
            return [f"layer_types: expected {_FULL} alone, found {shown(layers)}"]
        if type(count) is int and len(layers) != count:
            return [f"layer_types: expected one for each of {count} layers, found {len(layers)}"]
        return []
    expected = f"or layer_types of {_FULL} alone (windows are not supported)"
    if uses:
        return [f"use_sliding_window: expected false, {expected}, found true"]
    if uses is None and window is not None:
        return [f"sliding_window: expected null, {expected}, found {shown(window)}"]
    return []


def number_faults(config: Mapping[str, Any]) -> list[str]:
    """Says which numbers of a Llama-like layer cannot be, and which function it does not have.

    Args:
        config: The config.

    Returns:
        One sentence per fault.
    """
    faults = []
    epsilon, act = config.get("rms_norm_eps"), config.get("hidden_act")
    if epsilon is not None and not is_positive(epsilon):
        faults.append(f"rms_norm_eps: expected a positive number, found {shown(epsilon)}")
    if act not in (None, "silu"):
        faults.append(f"hidden_act: expected 'silu', found {act!r}")
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is int and type(shared) is int and shared > 0 and heads % shared:
        faults.append(
            f"num_key_value_heads: expected a divisor of the {heads} attention heads, found {shared}"
        )
    hidden, of_target = config.get("hidden_size"), config.get("target_hidden_size")
    if None not in (hidden, of_target) and hidden != of_target:
        faults.append(f"target_hidden_size: expected the hidden_size, {hidden}, found {shown(of_target)}")
    return faults


def shown(value: Any) -> str:
    """A value as the file spells it, cut short when it is long."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _same(found: Any, expected: Any) -> bool:
    """Whether two values are one in JSON, where 1 and 1.0 are alike, and 1 and true are not."""
    return isinstance(found, bool) == isinstance(expected, bool) and bool(found == expected)
