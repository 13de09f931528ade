"""Checks what a part returns, so that a mistake in a part is told as one."""

from typing import Any

from treeflash.errors import CompositionError


def returned(part: object, kind: str, method: str, value: Any, *expected: type[Any], why: str = "") -> Any:
    """Makes sure that a part returned what its interface promises.

    Args:
        part: The part.
        kind: What it is: "drafter", for instance.
        method: Its method.
        value: What the method returned.
        *expected: The types it may return.
        why: A clause for the message: why these, and what to do.

    Returns:
        `value`.

    Raises:
        CompositionError: When it is of another type; the message names the part.
    """
    if isinstance(value, expected):
        return value
    wanted = " or ".join(map(named, expected))
    raise CompositionError(
        f"{kind} {type(part).__name__}: {method} returned {spell_value(value)}, expected {wanted}{why}"
    )


def named(kind: type[Any]) -> str:
    """A type with its article.

    Args:
        kind: The type.

    Returns:
        "an OnDemand", for instance.
    """
    return f"{'an' if kind.__name__[0] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def spell_value(value: Any) -> str:
    """What was found in the place of something else, for a message.

    Args:
        value: Anything.

    Returns:
        A phrase.
    """
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not an instance"
    return repr(value) if value is None or isinstance(value, str) else named(type(value))
