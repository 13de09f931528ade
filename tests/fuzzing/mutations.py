"""Damage to files, as a fuzzer does it: bytes of any file, values and keys of what JSON and TOML hold."""

import random
from typing import Any

# What stands where something else was expected.
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    2**70,
    10**400,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("nan"),
    "",
    " ",
    "none",
    "auto",
    "..",
    "../../x",
    "/dev/null",
    "~nobody-of-that-name/x",
    "a" * 300,
    "a\0b",
    "\u00e9\u4e2d\U0001f600",
    "treeflash.testing:models/tiny-target",
    "no.such.module:thing",
    [],
    [[]],
    [None],
    ["x", 1],
    [0] * 1000,
    {},
    {"use": "opt-tree"},
    {"a": {"b": {"c": {}}}},
)


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flips, drops, repeats or inserts some bytes."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                changed[place:place] = chance.choice(
                    (b"\xff", b"\0", b"\xef\xbb\xbf", b"{", b'"', b"[", b"\n")
                )
            case 2:
                del changed[place : place + chance.choice((1, 4, 40))]
            case 3:
                changed[place:place] = changed[place : place + chance.choice((1, 10, 100))]
            case 4:
                del changed[place:]
            case _:
                changed[place:place] = bytes(chance.randrange(256) for _ in range(4))
    return bytes(changed)


def mutated_value(value: Any, chance: random.Random) -> Any:
    """Replaces, removes, renames or adds one thing somewhere in a tree of tables, lists and values."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.9:
            return {**value, key: mutated_value(value[key], chance)}
        rest = {name: kept for name, kept in value.items() if name != key}
        match chance.randrange(5):
            case 0:
                return rest
            case 1:
                return {**rest, key + chance.choice(("s", "_", "x")): value[key]}
            case 2:
                other = chance.choice(list(value.values()))
                return {**value, key: other}
            case 3:
                return {**value, key: _near(value[key], chance)}
            case _:
                return {**value, key: chance.choice(VALUES)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        place = chance.randrange(len(value))
        return [*value[:place], mutated_value(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)


def _near(value: Any, chance: random.Random) -> Any:
    """A value of the same type, near enough to be right now and then."""
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((value - 1, value + 1, 2 * value, value // 2, -value))
        case float():
            return chance.choice((value / 2, value + 1, -value, round(value)))
        case str():
            return chance.choice((value.upper(), value[:-1], f" {value}", value))
    return value
