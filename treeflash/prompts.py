"""Prompts from files, in the forms that data sets come in."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import attrs

from treeflash.errors import InputError, bullet_list
from treeflash.json_files import located_json, parse_json
from treeflash.text_files import not_utf8

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


# Keys that hold what a user says, in the order in which they are looked for: a text, or one per turn.
FORMS = (
    "turns",  # MT-Bench, and plain files
    "prompt",  # HumanEval, MBPP (sanitized), MATH-500 and MT-Bench in some places, and plain files
    "question",  # GSM8K
    "problem",  # MATH-500
    "text",  # MBPP
)


def read_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """Reads a file of JSON lines, one JSON array, or plain text; compressed if its name ends in `.gz`.

    In a file whose name ends in `.txt` each line that is not blank is a prompt. Otherwise each line or
    element is an object with `turns`, `prompt`, `question`, `problem` or `text`, the first of these that it
    has: a text, or a list of texts that are said in turn. Other keys are passed over. Repeated prompts are
    read once.

    Args:
        path: The file.
        limit: Rows to read at most.

    Returns:
        The prompts, in the file's order.

    Raises:
        InputError: When the file cannot be read, has no rows, or has rows without text; the message
            lists the lines at fault.
    """
    faults: list[str] = []
    return prompts_of(read_rows(path, faults, limit), str(path), faults)


def read_rows(path: Path | str, faults: list[str], limit: int | None = None) -> dict[str, Any]:
    """Reads the rows of a file that `read_prompts` reads, whatever they are.

    Args:
        path: The file.
        faults: Takes what is wrong with lines.
        limit: Rows to read at most.

    Returns:
        The rows, by what to call each in a message.

    Raises:
        InputError: When the file cannot be read.
    """
    path = Path(path)
    if ".txt" in path.suffixes[-2:]:
        lines = ((number, line.strip()) for number, line in enumerate(_lines(path), start=1))
        said = ((f"line {number}", {"prompt": line}) for number, line in lines if line)
        return dict(islice(said, limit))
    filled = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    begin, first = next(filled, (1, ""))
    if first.lstrip().startswith("["):
        return _elements(path, first + "".join(line for _, line in filled), limit)
    rows: dict[str, Any] = {}
    for number, line in islice(chain([(begin, first)] if first else [], filled), limit):
        where = f"line {number}"
        try:
            rows[where] = parse_json(line)
        except ValueError:
            faults.append(f"{where}: not valid JSON; expected an object on each line")
    return rows


def prompts_of(rows: Mapping[str, Any], source: str, faults: Sequence[str] = ()) -> list[Prompt]:
    """Finds the prompts in a data set's rows.

    Args:
        rows: The rows, by what to call each in a message.
        source: Where they are from, for messages.
        faults: What is known to be wrong with them already.

    Returns:
        The prompts, in the rows' order.

    Raises:
        InputError: When there are no rows, or some without text; the message lists them.
    """
    prompts: dict[str, Prompt] = {}
    found = list(faults)
    for where, row in rows.items():
        prompt = _parse(row, where, found)
        if prompt is not None:
            prompts.setdefault(prompt.key, prompt)
    if found:
        raise InputError(bullet_list(source, found, most=_SHOWN_FAULTS))
    if not prompts:
        raise InputError(f"{source}: expected at least one prompt, found none")
    return list(prompts.values())


def _elements(path: Path, text: str, limit: int | None) -> dict[str, Any]:
    """The rows of a file that is one array (MBPP, sanitized)."""
    found: list[Any] = located_json(text, path)
    return {f"element {number}": row for number, row in enumerate(found[:limit], start=1)}


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            yield from file
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path}: not whole ({error})") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        with opened(path, "rb") as lines:
            raise InputError(f"{path}: {not_utf8(lines, error)}") from None


def _parse(row: Any, where: str, faults: list[str]) -> Prompt | None:
    if not isinstance(row, dict):
        faults.append(f"{where}: expected a JSON object, found {type(row).__name__}")
        return None
    form = next((key for key in FORMS if key in row), None)
    if form is None:
        faults.append(
            f"{where}: expected one of the keys {', '.join(FORMS)}, found {', '.join(row) or 'none'}"
        )
        return None
    turns = [row[form]] if isinstance(row[form], str) else row[form]
    if not (
        isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        faults.append(f"{where}: {form}: expected text, found {row[form]!r}")
        return None
    if not is_text("".join(turns)):  # half of a character, which JSON can spell
        faults.append(f"{where}: {form}: expected text, found half of a surrogate pair in {row[form]!r}")
        return None
    return Prompt(tuple(turns))


def is_text(text: str) -> bool:
    """Whether a string is whole characters, and no halves of surrogate pairs among them.

    Args:
        text: What came from outside.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
