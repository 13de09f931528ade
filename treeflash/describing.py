"""What can be written into a recipe: components and their options, read off the classes themselves."""

import inspect
import re
from typing import Any, get_type_hints

import attrs

from treeflash.structuring import spell

_ENTRY = re.compile(r"^    (?P<name>\w+): (?P<text>.*(?:\n(?:        .*|\s*))*)", re.MULTILINE)


@attrs.frozen
class OptionRow:
    """A key of a table.

    Attributes:
        name: The key.
        kind: What its value is, in words.
        default: As TOML has it; "required" without one, empty for a key that may be left out.
        text: What it means.
    """

    name: str
    kind: str
    default: str
    text: str


def summary(component: type[Any]) -> str:
    """The first line of a class's documentation."""
    return (inspect.getdoc(component) or "").partition("\n")[0]


def option_rows(options: type[Any]) -> list[OptionRow]:
    """The keys that a table may hold.

    Args:
        options: The attrs class it is structured into.

    Returns:
        A row for each, in the class's order.
    """
    texts: dict[str, str] = {}
    for owner in reversed(options.__mro__):
        texts |= _attribute_texts(owner)
    kinds = get_type_hints(options)
    return [
        OptionRow(field.name, spell(kinds[field.name]), _default(field), texts.get(field.name, ""))
        for field in attrs.fields(options)
        if field.init and not field.name.startswith("_")
    ]


def _default(field: "attrs.Attribute[Any]") -> str:
    if field.default is attrs.NOTHING:
        return "required"
    if field.default is None:
        return ""
    return as_toml(field.default)


def as_toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    return str(value)


def _attribute_texts(owner: type[Any]) -> dict[str, str]:
    """What a class's `Attributes:` section says of each."""
    text = inspect.cleandoc(owner.__doc__ or "")
    _, _, section = text.partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    return {entry["name"]: " ".join(entry["text"].split()) for entry in _ENTRY.finditer(section)}
