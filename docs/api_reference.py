"""Writes the API page from docstrings and signatures, as Markdown that can be read where it lies."""

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs

_SECTION = re.compile(
    r"^(?P<name>Args|Attributes|Returns|Yields|Raises):\n(?P<text>(?:(?: .*)?\n)+)", re.MULTILINE
)
_ENTRY = re.compile(r"^    (?P<name>[\w*]+): (?P<text>.*(?:\n(?:        .*|[ \t]*$))*)", re.MULTILINE)
_TITLES = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}
_WIDTH = 100


def described(names: str) -> str:
    """Describes public names.

    Args:
        names: Separated by blanks. A module stands for the classes and functions it defines. Behind a class,
            `!a,b` keeps these of its methods and properties, and `!` none.

    Returns:
        Markdown.
    """
    return "\n".join(section for name in names.split() for section in _sections(name))


def _sections(name: str) -> Iterator[str]:
    place, limited, members = name.partition("!")
    value = _find(place)
    if isinstance(value, ModuleType):
        yield f"{_prose(inspect.getdoc(value))}\n"
        for inner, part in vars(value).items():
            if getattr(part, "__module__", None) == place and inspect.getdoc(part) and inner[0] != "_":
                yield from _object(f"{place}.{inner}", part, None)
    else:
        yield from _object(place, value, members.split(",") if limited else None)


def _find(place: str) -> Any:
    """A module, or what a module has."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, attribute = place.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def _object(place: str, value: Any, members: list[str] | None) -> Iterator[str]:
    yield f"### `{place}`\n"
    yield _body(place.rpartition(".")[2], value)
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        wanted = name[0] != "_" if members is None else name in members
        kind = isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
        if wanted and kind and inspect.getdoc(member):
            yield f"#### `{value.__name__}.{name}`\n"
            yield _body(name, member)


def _body(name: str, value: Any) -> str:
    lines = [f"```text\n{_signature(name, value)}\n```\n"]
    text = f"{inspect.cleandoc(value.__doc__ or '')}\n"
    lines += [f"{_prose(_SECTION.sub('', text))}\n"]
    for section in _SECTION.finditer(text):
        title, inside = section["name"], section["text"]
        if title not in _TITLES:
            lines.append(f"**{title}** {' '.join(inside.split())}\n")
            continue
        lines.append(f"**{_TITLES[title]}**\n")
        rows = [
            f"- `{entry['name']}`: {' '.join(entry['text'].split())}" for entry in _ENTRY.finditer(inside)
        ]
        lines.append("\n".join(rows) + "\n")
    return "\n".join(lines)


def _prose(text: str | None) -> str:
    """Paragraphs, a line each."""
    paragraphs = re.split(r"\n\s*\n", (text or "").strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"{name}: {_spelled(inspect.signature(value.fget).return_annotation)}"
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if inspect.isclass(value) and not (attrs.has(value) or "__init__" in vars(value)):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
        return f"class {name}({bases})" if bases else f"class {name}"
    signature = inspect.signature(value)
    head = f"class {name}" if inspect.isclass(value) else name
    parts, keywords = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            keywords = True
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keywords:
            parts.append("*")
            keywords = True
        parts.append(_parameter(parameter))
    returns = signature.return_annotation
    tail = "" if inspect.isclass(value) or returns is inspect.Signature.empty else f" -> {_spelled(returns)}"
    line = f"{head}({', '.join(parts)}){tail}"
    if len(line) <= _WIDTH:
        return line
    return f"{head}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    text = stars.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_spelled(parameter.annotation)}"
    if parameter.default is inspect.Parameter.empty:
        return text
    # What is made anew for each object, or has no short spelling, is left to the text.
    plain = isinstance(parameter.default, str | int | float | tuple | None)
    return f"{text} = {parameter.default!r}" if plain else f"{text} = ..."


def _spelled(annotation: Any) -> str:
    """A type without the modules it is from."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", text).replace("'", "").replace('"', "")
