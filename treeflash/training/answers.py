"""A data directory: the target's own answers to prompts, written batch by batch, never half.

    dataset.json        what the answers were made with
    answers-00012.jsonl the answers of one batch

A batch is written beside its place and renamed. A run that is killed leaves whole batches, and the next one
goes on with the first that is missing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from treeflash.errors import InputError
from treeflash.files import write_atomically
from treeflash.json_files import parse_json
from treeflash.training.folders import begin, read_manifest

MANIFEST = "dataset.json"
_PATTERN = "answers-*.jsonl"

Split = Literal["train", "heldout"]


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

    key: str
    turn: int
    split: Split
    prompt_ids: list[int]
    answer_ids: list[int]
    text: str
    stop_reason: str


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

    def open(self, manifest: Mapping[str, Any]) -> None:
        """Begins a directory, or makes sure that one begun before was begun alike.

        Args:
            manifest: What the answers are made with.

        Raises:
            InputError: When it was begun with other settings, or cannot be written.
        """
        begin(self.folder, MANIFEST, manifest)

    def manifest(self) -> dict[str, Any]:
        """What the answers were made with.

        Raises:
            InputError: When the folder holds no answers.
        """
        return read_manifest(self.folder, MANIFEST, "a folder made by treeflash regenerate")

    def has(self, batch: int) -> bool:
        """Whether a batch is written."""
        return self._path(batch).is_file()

    def write(self, batch: int, rows: Sequence[AnswerRow]) -> None:
        """Writes a batch, whole.

        Args:
            batch: Its number.
            rows: Its rows.

        Raises:
            InputError: When the disk does not take it.
        """
        lines = [json.dumps(attrs.asdict(row), ensure_ascii=False) for row in rows]
        write_atomically(self._path(batch), "\n".join(lines) + "\n")

    def rows(self, split: Split | None = None) -> Iterator[AnswerRow]:
        """Reads answers in a fixed order.

        Args:
            split: Which part; all when not given.

        Yields:
            The rows.

        Raises:
            InputError: When a file is not what `write` wrote.
        """
        for path in sorted(self.folder.glob(_PATTERN)):
            # Text has line ends of its own, which JSON does not escape: U+2028 for one.
            for number, line in enumerate(path.read_text(encoding="utf-8").rstrip("\n").split("\n"), start=1):
                try:
                    row = AnswerRow(**parse_json(line))
                except (ValueError, TypeError) as error:
                    raise InputError(f"{path}: line {number} is not an answer ({error})") from None
                if split is None or row.split == split:
                    yield row

    def _path(self, batch: int) -> Path:
        return self.folder / f"answers-{batch:05d}.jsonl"
