"""Rotary positions as configs state them: in one of two tables, beside them, or both."""

from collections.abc import Mapping
from typing import Any

from treeflash.checkpoints.config_keys import is_positive, shown

# The second is what the first was called before.
_TABLES = ("rope_parameters", "rope_scaling")
_THETA, _LENGTH, _SHARE = "rope_theta", "original_max_position_embeddings", "partial_rotary_factor"


def rope_theta(config: Mapping[str, Any]) -> float | None:
    """Base of the rotary positions, wherever a config states it.

    Args:
        config: The config.

    Returns:
        The base; None without a number.
    """
    stated = [value for value in _stated(config, _THETA).values() if is_positive(value)]
    return float(stated[0]) if stated else None


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of rotary positions, in one table.

    Args:
        config: One that `rope_faults` finds nothing wrong with.

    Returns:
        The table.
    """
    tables = list(_tables(config).values())
    found = _plain(tables[0]) if tables else {"rope_type": "default"}
    length = list(_stated(config, _LENGTH).values())
    if length and found["rope_type"] != "default":  # the others stretch it
        found[_LENGTH] = length[0]
    theta = rope_theta(config)
    return found if theta is None else {**found, _THETA: theta}


def rope_faults(config: Mapping[str, Any]) -> list[str]:
    """Says what of a config's rotary positions cannot be used, or contradicts itself.

    Args:
        config: The config.

    Returns:
        One sentence per fault.
    """
    faults = [
        f"{name}: expected an object, found {shown(config[name])}"
        for name in _TABLES
        if config.get(name) is not None and not isinstance(config[name], Mapping)
    ]
    tables = _tables(config)
    for name, table in tables.items():
        if any(isinstance(value, Mapping) for value in table.values()):
            faults.append(f"{name}: expected one table for all layers, found one for each kind of layer")
        if None not in (old := table.get("type"), new := table.get("rope_type")) and old != new:
            faults.append(f"{name}: expected one type, found {shown(new)} and, as type, {shown(old)}")
    plain = [_plain(table) for table in tables.values()]
    if len(plain) == 2 and plain[0] != plain[1]:
        faults.append(
            f"rope_scaling: expected what rope_parameters says, {shown(plain[0])}, or no such key; "
            f"found {shown(plain[1])}"
        )
    for key in (_THETA, _LENGTH, _SHARE):
        stated = _stated(config, key)
        odd = [
            f"{where}: expected a positive number, found {shown(value)}"
            for where, value in stated.items()
            if not is_positive(value)
        ]
        first, *others = stated.items() or [("", None)]
        faults += odd or [
            f"{where}: expected the {shown(first[1])} of {first[0]}, found {shown(value)}"
            for where, value in others
            if value != first[1]
        ]
        if key == _SHARE and not odd and first[1] not in (None, 1):
            faults.append(
                f"{first[0]}: expected 1, found {first[1]} (heads turned in part are not supported)"
            )
    return faults


def _tables(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {name: config[name] for name in _TABLES if isinstance(config.get(name), Mapping) and config[name]}


def _stated(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A key's values by where they stand."""
    places = {key: config} | {f"{name}.{key}": table for name, table in _tables(config).items()}
    return {where: place[key] for where, place in places.items() if place.get(key) is not None}


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table without what may stand beside it, and with its type under the newer name."""
    kind = table.get("rope_type") or table.get("type") or "default"
    left_out = ("type", "rope_type", _THETA, _LENGTH, _SHARE)
    rest = {key: value for key, value in table.items() if key not in left_out and value is not None}
    return {"rope_type": kind, **rest}
