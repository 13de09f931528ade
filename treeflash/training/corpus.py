"""The texts of data directories, as a drafter is trained on them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import attrs
import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from treeflash.errors import InputError, bullet_list
from treeflash.training.answers import AnswerStore
from treeflash.training.texts import Texts
from treeflash.training.token_file import TokenFile

_SHOWN_FAULTS = 10


@attrs.frozen(eq=False)
class Corpus:
    """Texts of one or several data directories.

    Attributes:
        train: What is learned from.
        heldout: What is measured on.
        fingerprint: A hash of all of it, in order.
    """

    train: Texts
    heldout: Texts
    fingerprint: str

    @classmethod
    def read(cls, folders: Sequence[Path], target_digest: str, length: int, heldout_texts: int) -> Self:
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
        if not folders:
            raise InputError("expected one data directory or more, found none")
        opened = [_open(folder, target_digest) for folder in folders]
        faults: list[str] = []
        parts = []
        for number, (folder, file) in enumerate(zip(folders, opened, strict=True)):
            found: list[str] = []
            parts.append(_places(number, file, length, found))
            faults += [f"{folder}: {fault}" for fault in found]
        if faults:
            headline = f"prompts that leave no room in data.length = {length}"
            raise InputError(bullet_list(headline, faults, most=_SHOWN_FAULTS))
        places, keys, turns, held = (numpy.concatenate(column) for column in zip(*parts, strict=True))
        # Directories may hold different shares of the same prompts out.
        learned = places[~held & ~numpy.isin(keys, keys[held])]
        named = ", ".join(map(str, folders))
        if not len(learned):
            raise InputError(f"{named}: expected answers to train on, found none")
        if not held.any():
            raise InputError(
                f"{named}: expected held-out answers to measure on, found none; regenerate with a greater "
                "--heldout (in a study, answers.heldout)"
            )
        # By key, which is a hash: some of every directory, of prompts long and short.
        order = numpy.lexsort((turns[held], keys[held]))[:heldout_texts]
        arrays = tuple(file.token_ids for file in opened)
        train, heldout = Texts(arrays, learned), Texts(arrays, places[held][order])
        return cls(train, heldout, _fingerprint(train, heldout))

    @property
    def texts(self) -> Texts:
        """All texts: those to train on, then the held-out ones."""
        return self.train + self.heldout

    def check_tokens(self, vocab_size: int) -> None:
        """Makes sure that a target knows all tokens.

        Args:
            vocab_size: Of the target.

        Raises:
            InputError: When it does not.
        """
        most = max(int(array.max()) for array in self.train.arrays if len(array))
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
        prompts, answers = self.train.token_counts(vocab_size)
        order = numpy.lexsort((-prompts.numpy(), -answers.numpy()))  # stable: then by id
        return torch.from_numpy(numpy.sort(order[:size]))


def _open(folder: Path, target_digest: str) -> TokenFile:
    """Opens a data directory that is finished and of this target."""
    store = AnswerStore(folder)
    manifest = store.manifest()
    written_by, wanted = manifest.get("target"), manifest.get("rows")
    if written_by != target_digest:
        raise InputError(
            f"{folder}: its answers are another target's: expected those of {target_digest}, "
            f"found those of {written_by}"
        )
    file = TokenFile.open(store)
    if len(file) != wanted:
        raise InputError(
            f"{folder}: has {len(file)} of {wanted} answers; start the treeflash regenerate that made it "
            "again, to finish it"
        )
    return file


_Part = tuple[NDArray[numpy.int64], NDArray[numpy.uint64], NDArray[numpy.int32], NDArray[numpy.bool_]]


def _places(number: int, file: TokenFile, length: int, faults: list[str]) -> _Part:
    """Places, keys, turns and splits of a directory's answers, those that are empty left out."""
    used = file.answer_lengths > 0
    keys = file.keys.numpy().view(numpy.uint64)[used]
    begins, answers, ends = file.bounds.numpy()[used].T
    room = answers - begins < length
    faults += [
        f"prompt {key:016x} has {tokens} tokens"
        for key, tokens in zip(keys[~room].tolist(), (answers - begins)[~room].tolist(), strict=True)
    ]
    ends = numpy.minimum(ends, begins + length)
    places = numpy.stack([numpy.full_like(begins, number), begins, answers, ends], axis=1)
    return places, keys, file.turns.numpy()[used], file.heldout.numpy()[used]


def _fingerprint(train: Texts, heldout: Texts) -> str:
    found = hashlib.sha256(f"{len(train)}".encode())
    for text in train + heldout:
        length = torch.tensor([len(text.prompt_ids)])
        found.update(torch.cat([length, text.prompt_ids, text.answer_ids]).numpy().data)
    return found.hexdigest()[:16]
