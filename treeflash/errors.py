"""What can go wrong, one class per cause.

Every error is a `TreeflashError` and also the builtin kind a caller would expect, so that both
`except TreeflashError` and `except ValueError` do what they say.
"""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager


class TreeflashError(Exception):
    """Anything treeflash raises about what it was given."""


class InputError(TreeflashError, ValueError):
    """A prompt or a generation setting that cannot be decoded."""


class CompositionError(TreeflashError, TypeError):
    """Parts that do not fit together."""


class UnknownNameError(TreeflashError, LookupError):
    """A name nothing is registered under."""


class UnsupportedTargetError(TreeflashError, TypeError):
    """A model that cannot be verified in trees; the message names the reason."""


class CheckpointError(TreeflashError, ValueError):
    """A drafter checkpoint that does not fit; the message lists everything that does not."""


class RecipeError(TreeflashError, ValueError):
    """A recipe that cannot be built; the message lists every fault found in it."""


class TrainingError(TreeflashError, RuntimeError):
    """A training run that cannot go on; the message names the last good checkpoint."""


class PluginError(TreeflashError, RuntimeError):
    """A plugin that failed, or two that claim the same name."""


@contextmanager
def blamed_on(place: object) -> Iterator[None]:
    """Puts a place, a recipe's file for instance, before the message of whatever goes wrong inside.

    Args:
        place: Where the user would look.

    Yields:
        Nothing.
    """
    try:
        yield
    except TreeflashError as error:
        error.args = (f"{place}: {error}",)
        raise


def nearest(name: str, choices: Iterable[str]) -> str:
    """Says which valid name was probably meant.

    Args:
        name: What was found.
        choices: The valid names.

    Returns:
        A clause to append to a message: the nearest choice when one is near, and all of them when
        they are few; empty when there is nothing to choose from.
    """
    names = sorted(choices)
    # What begins so is nearer than what looks so.
    longer = [choice for choice in names if name and choice.startswith(name)]
    close = longer[:1] or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    clause = f"; did you mean {close[0]!r}?" if close else ""
    if names and len(names) <= 12:
        clause += f" (known: {', '.join(names)})"
    return clause


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or what kind it is when it says nothing.

    Args:
        error: The error.

    Returns:
        A line; with the next one where the first ends in a colon.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


def spelled(error: BaseException) -> str:
    """An error in a line.

    Args:
        error: The error.

    Returns:
        Its kind and what it says first.
    """
    return f"{type(error).__name__}: {first_line(error)}"


def bullet_list(headline: str, faults: Sequence[str], most: int | None = None) -> str:
    """Formats several faults as one message, a line each.

    Args:
        headline: What they are faults of.
        faults: One sentence per fault.
        most: Faults shown, where one mistake makes many; all when not given.

    Returns:
        The headline alone with a single fault behind it, or a headline followed by a list.
    """
    if len(faults) == 1:
        return f"{headline}: {faults[0]}"
    shown = list(faults[:most])
    if len(shown) < len(faults):
        shown.append(f"and {len(faults) - len(shown)} more like these")
    return "\n  - ".join([f"{headline}: {len(faults)} faults", *shown])
