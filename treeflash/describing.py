"""What can be written into a recipe: components and their options, read off the classes themselves."""

import inspect
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import attrs
import tomli_w

from treeflash.structuring import spell

_ENTRY = re.compile(r"^    (?P<name>\w+): (?P<text>.*(?:\n(?:        .*|[ \t]*$))*)", re.MULTILINE)


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
        A row for each, in the class's order; none for a class that is not attrs', which no table fits.
    """
    if not attrs.has(options):
        return []
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
    default: Any = field.default
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class, though typed as a function
        default = None if default.takes_self else default.factory()
    return "" if default is None else as_toml(default)


def as_toml(value: Any) -> str:
    """A value as TOML has it, on one line.

    Args:
        value: A string, a number, a list or a table of such.

    Returns:
        What stands behind the equals sign.
    """
    if attrs.has(type(value)):
        value = attrs.asdict(value)
    if isinstance(value, Mapping):
        given = {key: item for key, item in value.items() if item is not None}  # as a file leaves it out
        return f"{{{', '.join(f'{key} = {as_toml(item)}' for key, item in given.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _attribute_texts(owner: type[Any]) -> dict[str, str]:
    """What a class's `Attributes:` section says of each."""
    text = inspect.cleandoc(owner.__doc__ or "")
    _, _, section = text.partition("Attributes:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    return {entry["name"]: " ".join(entry["text"].split()) for entry in _ENTRY.finditer(section)}
