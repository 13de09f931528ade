"""From a table to an attrs class: strict about types, complete about faults."""

import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin

import attrs
from cattrs import Converter
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, IterableValidationError

from treeflash.errors import nearest

T = TypeVar("T")


class _WrongTypeError(ValueError):
    """A value of another type than the option's."""


def structure(table: Mapping[str, Any], options: type[T], where: str, faults: list[str]) -> T | None:
    """Makes an options object of a table.

    Args:
        table: Keys and values.
        options: The attrs class.
        where: The table's name, for messages.
        faults: Every fault is added here.

    Returns:
        The object, or None when there were faults.
    """
    try:
        return _converter().structure(table, options)
    except ClassValidationError as error:
        faults += _explain(error, table, options, where)
    except (TypeError, ValueError) as error:
        faults.append(f"{where}: {error}")
    return None


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, prefer_attrib_converters=True)
    for kind in (bool, int, float, str):
        converter.register_structure_hook(kind, _strict)
    converter.register_structure_hook_func(_is_optional, _optional(converter))
    return converter


def _strict(value: Any, kind: type) -> Any:
    """Takes a value of just this type; a file's 1 may stand for 1.0, and nothing else is turned."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise _WrongTypeError(f"expected {_spell(kind)}, found {value!r}")
    return value


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def _optional(converter: Converter) -> Any:
    def hook(value: Any, kind: Any) -> Any:
        if value is None:
            return None
        (inner,) = (option for option in get_args(kind) if option is not type(None))
        return converter.structure(value, inner)

    return hook


def _explain(error: ClassValidationError, table: Mapping[str, Any], options: type, where: str) -> list[str]:
    faults = []
    fields = {field.name: field for field in attrs.fields(options) if field.init}
    located, others = error.group_exceptions()
    for cause, note in located:
        if isinstance(cause, KeyError):
            kind = _spell(fields[note.name].type)
            faults.append(f"{where}.{note.name}: expected {kind}, found nothing")
        elif isinstance(cause, IterableValidationError):
            faults.append(f"{where}.{note.name}: expected {_spell(note.type)}, found {table[note.name]!r}")
        else:
            faults.append(f"{where}.{note.name}: {cause}")
    for cause in others:
        if isinstance(cause, ForbiddenExtraKeysError):
            faults += [
                f"{where}.{key}: unknown key{nearest(key, fields)}" for key in sorted(cause.extra_fields)
            ]
        else:
            faults.append(f"{where}: {cause}")
    return faults


def _spell(kind: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if _is_optional(kind):
        return " or ".join(_spell(option) for option in get_args(kind) if option is not type(None))
    return names.get(kind, getattr(kind, "__name__", str(kind)))
