"""The texts of data directories, as a drafter is trained on them."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from treeflash.errors import InputError, bullet_list
from treeflash.packed_text import PackedText
from treeflash.training.answers import AnswerRow, AnswerStore

_SHOWN_FAULTS = 10


@attrs.frozen
class Text:
    """A prompt and the target's answer.

    Attributes:
        prompt_ids: Token ids.
        answer_ids: Token ids.
    """

    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.answer_ids)


@attrs.frozen
class Corpus:
    """Texts of one or several data directories.

    Attributes:
        train: What is learned from.
        heldout: What is measured on.
        fingerprint: A hash of all of it, in order.
    """

    train: Sequence[Text]
    heldout: Sequence[Text]
    fingerprint: str

    @classmethod
    def read(cls, folders: Sequence[Path], target_digest: str, length: int, heldout_texts: int) -> "Corpus":
        """Reads data directories.

        Args:
            folders: The directories.
            target_digest: Of the target that must have written the answers.
            length: Answers are cut where prompt and answer grow longer.
            heldout_texts: Held-out texts to keep at most.

        Returns:
            The corpus. A prompt that one directory holds out is not learned from another's answer to it.

        Raises:
            InputError: For a directory of another target or one that is not finished, a prompt that leaves
                no room, or when there is nothing to train on or to measure on.
        """
        learned: list[tuple[str, Text]] = []
        held: list[tuple[str, int, Text]] = []
        faults: list[str] = []
        for folder in folders:
            store = AnswerStore(folder)
            manifest = store.manifest()
            written_by = manifest.get("target")
            if written_by != target_digest:
                raise InputError(
                    f"{folder}: its answers are another target's: expected those of {target_digest}, "
                    f"found those of {written_by}"
                )
            rows, wanted = list(store.rows()), manifest.get("rows")
            if len(rows) != wanted:
                raise InputError(
                    f"{folder}: has {len(rows)} of {wanted} answers; start the treeflash regenerate that "
                    "made it again, to finish it"
                )
            for row in rows:
                if not row.answer_ids:
                    continue
                if len(row.prompt_ids) >= length:
                    faults.append(f"{folder}: prompt {row.key} has {len(row.prompt_ids)} tokens")
                elif row.split == "train":
                    learned.append((row.key, _text(row, length)))
                else:
                    held.append((row.key, row.turn, _text(row, length)))
        if faults:
            headline = f"prompts that leave no room in data.length = {length}"
            raise InputError(bullet_list(headline, faults, most=_SHOWN_FAULTS))
        # Directories may hold different shares of the same prompts out.
        kept_out = {key for key, *_ in held}
        train = [text for key, text in learned if key not in kept_out]
        named = ", ".join(map(str, folders))
        if not train:
            raise InputError(f"{named}: expected answers to train on, found none")
        if not held:
            raise InputError(
                f"{named}: expected held-out answers to measure on, found none; regenerate with a greater "
                "--heldout (in a study, answers.heldout)"
            )
        # By key, which is a hash: some of every directory, of prompts long and short.
        heldout = [text for *_, text in sorted(held, key=lambda entry: entry[:2])][:heldout_texts]
        found = hashlib.sha256(f"{len(train)}".encode())
        for text in (*train, *heldout):
            found.update(
                torch.tensor([len(text.prompt_ids), *text.prompt_ids, *text.answer_ids]).numpy().tobytes()
            )
        return cls(train, heldout, found.hexdigest()[:16])

    @property
    def texts(self) -> list[Text]:
        """All texts: those to train on, then the held-out ones."""
        return [*self.train, *self.heldout]

    def check_tokens(self, vocab_size: int) -> None:
        """Makes sure that a target knows all tokens.

        Args:
            vocab_size: Of the target.

        Raises:
            InputError: When it does not.
        """
        most = max(max(*text.prompt_ids, *text.answer_ids) for text in self.texts)
        if most >= vocab_size:
            raise InputError(f"the answers hold token {most}: expected ids below the target's {vocab_size}")

    def shortlist(self, size: int, vocab_size: int) -> Tensor:
        """The tokens most frequent in answers; then in prompts, then of the lowest ids.

        Args:
            size: How many.
            vocab_size: How many there are.

        Returns:
            int64 `[size]`, ascending; all tokens when there are no more.
        """
        answers = Counter(token for text in self.train for token in text.answer_ids)
        prompts = Counter(token for text in self.train for token in text.prompt_ids)
        ordered = sorted(range(vocab_size), key=lambda token: (-answers[token], -prompts[token], token))
        return torch.tensor(sorted(ordered[:size]))


def pack(texts: Sequence[Text], device: torch.device | str = "cpu") -> PackedText:
    """Puts texts side by side.

    Args:
        texts: The texts.
        device: Where the row goes.

    Returns:
        The row.
    """
    return PackedText.pack([(text.prompt_ids, text.answer_ids) for text in texts], device)


def passes(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Divides texts, in order, into passes of the target.

    Args:
        lengths: Tokens of each text.
        limit: Tokens in a pass at most.

    Returns:
        The numbers of the texts of each pass.
    """
    divided: list[list[int]] = []
    room = 0
    for number, length in enumerate(lengths):
        if not divided or length > room:
            divided.append([])
            room = limit
        divided[-1].append(number)
        room -= length
    return divided


def _text(row: AnswerRow, length: int) -> Text:
    return Text(row.prompt_ids, row.answer_ids[: length - len(row.prompt_ids)])
