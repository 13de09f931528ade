"""Prompts from files, in the forms that data sets come in."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from treeflash.errors import InputError, bullet_list

_SHOWN_FAULTS = 20


@attrs.frozen
class Prompt:
    """What a user says, turn by turn.

    Attributes:
        turns: One text per turn; answers come between them.
        key: A hash of the turns: the same wherever and in whatever order the prompt is read.
    """

    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps(self.turns, ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _turns(row: Mapping[str, Any]) -> Any:
    return row["turns"]


def _one(key: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda row: [row[key]]


# The key that tells a form, in the order in which they are looked for, and how to read its turns.
FORMS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "turns": _turns,  # MT-Bench, and plain files
    "prompt": _one("prompt"),  # MATH-500, HumanEval, and plain files
    "question": _one("question"),  # GSM8K
    "text": _one("text"),  # MBPP
}


def read_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """Reads a file of JSON lines.

    Each line is an object with `turns` (a list of texts), `prompt`, `question` or `text`, the first of these
    that it has; other keys are passed over. Repeated prompts are read once.

    Args:
        path: The file.
        limit: Rows to read at most.

    Returns:
        The prompts, in the file's order.

    Raises:
        InputError: When the file cannot be read, has no rows, or has rows without text; the message
            lists the lines at fault.
    """
    path = Path(path)
    prompts: dict[str, Prompt] = {}
    faults: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if limit is not None and number > limit:
            break
        if not line.strip():
            continue
        prompt = _parse(line, f"line {number}", faults)
        if prompt is not None:
            prompts.setdefault(prompt.key, prompt)
    if faults:
        raise InputError(bullet_list(str(path), faults, most=_SHOWN_FAULTS))
    if not prompts:
        raise InputError(f"{path}: expected at least one prompt, found none")
    return list(prompts.values())


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield from file
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason})") from None


def _parse(line: str, where: str, faults: list[str]) -> Prompt | None:
    try:
        row = json.loads(line)
    except ValueError:
        faults.append(f"{where}: not valid JSON")
        return None
    if not isinstance(row, dict):
        faults.append(f"{where}: expected a JSON object, found {type(row).__name__}")
        return None
    form = next((key for key in FORMS if key in row), None)
    if form is None:
        faults.append(
            f"{where}: expected one of the keys {', '.join(FORMS)}, found {', '.join(row) or 'none'}"
        )
        return None
    turns = FORMS[form](row)
    if not (
        isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        faults.append(f"{where}: {form}: expected text, found {row[form]!r}")
        return None
    return Prompt(tuple(turns))
