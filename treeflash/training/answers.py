"""A data directory: the target's own answers to prompts, written batch by batch.

    dataset.json        what the answers were made with
    answers-00012.jsonl the answers of one batch, for people to read
    SHA256SUMS          a line for each of these files once it is whole
    tokens.safetensors  the same answers for programs: see `token_file`

A batch is written beside its place and renamed, and then its sum is added. A run that is killed leaves whole
batches, and the next one continues with the first batch that has no sum or another one.
"""

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, in_, instance_of, matches_re

from treeflash.errors import InputError
from treeflash.files import write_atomically
from treeflash.json_files import located_json
from treeflash.text_files import decoded
from treeflash.training.checksums import SUMS, append_sum, check_sum, digest_of, read_sums, write_sums
from treeflash.training.folders import begin, read_manifest

MANIFEST = "dataset.json"
_BATCH = re.compile(r"answers-(?P<number>\d{5,})\.jsonl")

Split = Literal["train", "heldout"]


def _token_ids(instance: Any, attribute: "attrs.Attribute[list[int]]", value: list[int]) -> None:
    try:
        # True is 1 in Python.
        right = (
            isinstance(value, list)
            and set(map(type, value)) <= {int}
            and min(array("i", value), default=0) >= 0
        )
    except OverflowError:
        right = False
    if not right:
        raise ValueError(f"{attribute.name}: expected a list of token ids")


@attrs.frozen
class AnswerRow:
    """A prompt and the target's answer to it.

    Attributes:
        key: The prompt's key.
        turn: Which of its turns is answered, from 0.
        split: "train", or "heldout" for what training must not see.
        prompt_ids: Token ids of the conversation up to the answer.
        answer_ids: Token ids of the answer, a stop token included; empty where the conversation had outgrown
            the target.
        text: The answer as text.
        stop_reason: Why it ended.
    """

    key: str = attrs.field(validator=[instance_of(str), matches_re(r"[0-9a-f]{16}")])
    turn: int = attrs.field(validator=[instance_of(int), and_(ge(0))])
    split: Split = attrs.field(validator=in_(("train", "heldout")))
    prompt_ids: list[int] = attrs.field(validator=_token_ids)
    answer_ids: list[int] = attrs.field(validator=_token_ids)
    text: str = attrs.field(validator=instance_of(str))
    stop_reason: str = attrs.field(validator=instance_of(str))


def split_of(key: str, heldout: float) -> Split:
    """Which part a prompt belongs to, whatever file it comes from.

    Args:
        key: The prompt's key.
        heldout: Share of the prompts to hold out, 0 to 1.

    Returns:
        The part, a function of the key alone.
    """
    return "heldout" if int(key[:8], 16) < heldout * 2**32 else "train"


@attrs.frozen
class AnswerStore:
    """A data directory.

    Attributes:
        folder: Where it is.
    """

    folder: Path

    def open(self, manifest: Mapping[str, Any]) -> set[int]:
        """Begins a directory, or makes sure that one begun before has the same settings.

        Args:
            manifest: What the answers are made with.

        Returns:
            Numbers of the batches that are written and whole. Others are to be written.

        Raises:
            InputError: When it was begun with other settings, or cannot be written.
        """
        begin(self.folder, MANIFEST, manifest)
        try:
            sums = read_sums(self.folder)
        except InputError:
            sums = {}  # every batch is written again
        whole = {number: path.name for number, path in self._batches().items() if _is_whole(path, sums)}
        kept = {MANIFEST: digest_of(self.folder / MANIFEST), **{name: sums[name] for name in whole.values()}}
        write_sums(self.folder, kept)
        return set(whole)

    def manifest(self) -> dict[str, Any]:
        """What the answers were made with.

        Raises:
            InputError: When the folder holds no answers, or the file is not what was written.
        """
        found = read_manifest(self.folder, MANIFEST, "a folder made by treeflash regenerate")
        sums = read_sums(self.folder)
        if MANIFEST not in sums:
            raise InputError(f"{self.folder / SUMS}: has no sum of {MANIFEST}; {_AGAIN}")
        _check(self.folder / MANIFEST, sums[MANIFEST])
        return found

    def files(self) -> dict[Path, str]:
        """Files of the batches that are written, in order, with their sums.

        Raises:
            InputError: When the file of sums is broken, or a batch that it lists is missing.
        """
        sums, batches = read_sums(self.folder), self._batches()
        listed = {name for name in sums if _BATCH.fullmatch(name)}
        missing = sorted(listed - {path.name for path in batches.values()})
        if missing:
            raise InputError(f"{self.folder / missing[0]}: expected a file, found none; {_AGAIN}")
        return {path: sums[path.name] for path in batches.values() if path.name in sums}

    def write(self, batch: int, rows: Sequence[AnswerRow]) -> None:
        """Writes a batch, whole.

        Args:
            batch: Its number.
            rows: Its rows.

        Raises:
            InputError: When the disk does not take it.
        """
        lines = [json.dumps(attrs.asdict(row), ensure_ascii=False) for row in rows]
        path = self.folder / f"answers-{batch:05d}.jsonl"
        write_atomically(path, "\n".join(lines) + "\n")
        append_sum(path)

    def rows(self, split: Split | None = None) -> Iterator[AnswerRow]:
        """Reads answers in a fixed order.

        Args:
            split: Which part; all when not given.

        Yields:
            The rows.

        Raises:
            InputError: When a file is not what `write` wrote.
        """
        for path, expected in self.files().items():
            _check(path, expected)
            # Text has line ends of its own, which JSON does not escape: U+2028 for one.
            lines = decoded(path.read_bytes(), path).rstrip("\n").split("\n")
            for number, line in enumerate(lines, start=1):
                row = _row(line, f"{path}: line {number}")
                if split is None or row.split == split:
                    yield row

    def _batches(self) -> dict[int, Path]:
        """Files of batches by number, in order, whether whole or not."""
        found = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            told = _BATCH.fullmatch(path.name)
            if told is not None:
                found[int(told["number"])] = path
        return dict(sorted(found.items()))


_AGAIN = "start the treeflash regenerate that made the folder again, to have it made anew"


def _check(path: Path, expected: str) -> None:
    try:
        check_sum(path, expected)
    except InputError as error:
        raise InputError(f"{error}; {_AGAIN}") from None


def _is_whole(path: Path, sums: Mapping[str, str]) -> bool:
    try:
        check_sum(path, sums[path.name])
    except (InputError, KeyError):
        return False
    return True


def _row(line: str, where: str) -> AnswerRow:
    value = located_json(line, where)
    try:
        row = AnswerRow(**value)
    except (ValueError, TypeError) as error:
        raise InputError(f"{where} is not an answer ({error})") from None
    if row.answer_ids and not row.prompt_ids:
        raise InputError(f"{where} is not an answer (prompt_ids: expected one token or more)")
    return row
