"""From a table to an attrs class: strict about types, complete about faults."""

import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import attrs
from cattrs import Converter
from cattrs.errors import BaseValidationError

from treeflash.errors import first_line, nearest

T = TypeVar("T")

_SEQUENCES: tuple[Any, ...] = (list, tuple)
# What Python code may give for each plain type.
_ABSTRACT: dict[Any, type[Any]] = {int: Integral, float: Real, str: str, bool: bool}
_NAMES = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
# How attrs' own validators word a number out of range.
_OUT_OF_RANGE = re.compile(r"'\w+' must be (?P<expected>.+): (?P<found>.+)")


def structure(
    table: Mapping[str, Any],
    options: type[T],
    where: str,
    faults: list[str],
    takers: Callable[[str], Sequence[str]] = lambda key: (),
) -> T | None:
    """Makes an options object of a table.

    Args:
        table: Keys and values.
        options: The attrs class.
        where: The table's name, for messages.
        faults: Every fault is added here.
        takers: Which other components take a key that this one does not know.

    Returns:
        The object, or None when there were faults.
    """
    if not hasattr(options, "__attrs_attrs__"):
        faults.append(f"{where}: expected an attrs class for options, found {options.__name__}")
        return None
    known = {field.name: field for field in attrs.fields(cast(Any, options)) if field.init}
    found = [
        f"{where}.{key}: unknown key{_hint(where, key, known, takers(key))}"
        for key in table
        if key not in known
    ]
    kinds, converter = get_type_hints(options), _converter()
    values: dict[str, Any] = {}
    for key, field in known.items():
        place = f"{where}.{key}"
        if key not in table:
            if field.default is attrs.NOTHING:
                found.append(f"{place}: expected {spell(kinds[key])}, found nothing")
            continue
        if attrs.has(kinds[key]) and isinstance(table[key], Mapping):
            structure(table[key], kinds[key], place, found)
        fault = _value_fault(table[key], kinds[key], field, converter)
        if fault is not None and not any(other.startswith(f"{place}.") for other in found):
            found.append(f"{place}: {fault}")
        values[key] = table[key]
    if not found:
        try:
            made: T = converter.structure(values, options)
            return made
        except (BaseValidationError, TypeError, ValueError) as error:
            found.append(f"{where}: {first_line(error)}")
    faults += found
    return None


def _hint(where: str, key: str, known: Collection[str], takers: Sequence[str]) -> str:
    """What may be done about a key that a table does not take."""
    if not takers:
        return nearest(key, known)
    *others, last = map(repr, takers)
    who = f"{', '.join(others)} and {last} take" if others else f"{last} takes"
    return f" here{nearest('', known)}; {who} it: {where}.use={takers[-1]}"


def _value_fault(value: Any, kind: Any, field: "attrs.Attribute[Any]", converter: Converter) -> str | None:
    """What is wrong with one value, by its type and its validator, whatever the others are."""
    try:
        structured = converter.structure(value, kind)
    except (BaseValidationError, TypeError, ValueError):
        return f"expected {spell(kind)}, found {value!r}"
    return _validator_fault(structured, field)


def field_faults(values: Mapping[str, Any], options: type[Any]) -> list[str]:
    """What is wrong with values that Python code gives for an attrs class's fields.

    Args:
        values: By field. Of types other than numbers, strings and truth values nothing is said.
        options: The class.

    Returns:
        A sentence for each fault.
    """
    fields = {field.name: field for field in attrs.fields(cast(Any, options))}
    found = []
    for name, value in values.items():
        field = fields[name]
        plain = [kind for kind in (get_args(field.type) if _is_optional(field.type) else [field.type])]
        if field.converter is not None or not {*plain} <= {*_ABSTRACT, type(None)}:
            continue
        if not isinstance(value, tuple(_ABSTRACT.get(kind, kind) for kind in plain)):
            found.append(f"{name}: expected {spell(field.type)}, found {value!r}")
        elif (fault := _validator_fault(value, field)) is not None:
            found.append(f"{name}: {fault}")
    return found


def _validator_fault(value: Any, field: "attrs.Attribute[Any]") -> str | None:
    """What a field's validator says of a value of the right type."""
    if field.validator is None:
        return None
    try:
        field.validator(None, field, value)
    except (TypeError, ValueError) as error:
        if len(error.args) == 4 and _is_choices(error.args[2]):  # message, field, choices, value
            *others, last = map(str, error.args[2])
            near = nearest(value, [*others, last]).partition(" (known")[0] if isinstance(value, str) else ""
            return f"expected {', '.join(others)} or {last}, found {value!r}{near}"
        match = _OUT_OF_RANGE.fullmatch(str(error))
        if match:
            return "expected {expected}, found {found}".format(**match.groupdict())
        return first_line(ValueError(*error.args[:1]))  # attrs may put field and value behind its message
    except AttributeError:
        return None  # it looks at other fields too: left to the whole object
    return None


def _is_choices(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str)


def _converter() -> Converter:
    converter = Converter(forbid_extra_keys=True)
    for kind in _NAMES:
        converter.register_structure_hook(kind, _strict)

    def optional(value: Any, kind: Any) -> Any:
        if value is None:
            return None
        (inner,) = (option for option in get_args(kind) if option is not type(None))
        return converter.structure(value, inner)

    def sequence(value: Any, kind: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeError(f"expected a list, found {value!r}")
        inner = get_args(kind)[0]
        return get_origin(kind)(converter.structure(item, inner) for item in value)

    converter.register_structure_hook_func(_is_optional, optional)
    converter.register_structure_hook_func(lambda kind: get_origin(kind) in _SEQUENCES, sequence)
    return converter


def _strict(value: Any, kind: type) -> Any:
    """Takes a value of just this type; a file's 1 may stand for 1.0, and nothing else is turned."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"expected {spell(kind)}, found {value!r}")
    return value


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def spell(kind: Any) -> str:
    """A type in words.

    Args:
        kind: The type.

    Returns:
        "an integer", for instance.
    """
    if _is_optional(kind):
        return " or ".join(spell(option) for option in get_args(kind) if option is not type(None))
    if get_origin(kind) in _SEQUENCES:
        return f"a list ({spell(get_args(kind)[0])} each)"
    if attrs.has(kind):
        return "a table"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
