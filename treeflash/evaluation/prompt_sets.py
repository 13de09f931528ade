"""The prompt sets that papers measure on, worded as they word them, and files of one's own."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.errors import InputError, first_line, nearest
from treeflash.prompts import Prompt, prompts_of, read_rows


def _as_it_is(text: str) -> str:
    return text


def _boxed(question: str) -> str:
    # Some copies of MATH-500 ask already; only a request has an empty box.
    if "\\boxed{}" in question:
        return question
    return f"{question}\nReason step by step, and put the final answer in \\boxed{{}}."


def _code(prompt: str) -> str:
    return f"Write a solution to this problem that passes its tests.\n```python\n{prompt.rstrip()}\n```"


@attrs.frozen
class KnownSet:
    """A public prompt set.

    Attributes:
        hub: Its name on the hub.
        config: Which of its parts.
        split: Which split of it.
        word: What a user says, of what a row says.
        task_ids: First and last of the split, where the upstream file has all splits in one.
    """

    hub: str
    config: str | None
    split: str
    word: Callable[[str], str] = _as_it_is
    task_ids: tuple[int, int] | None = None


# Wording after the TreeFlash paper's appendix, in our own words where it quotes.
KNOWN = {
    "gsm8k": KnownSet("openai/gsm8k", "main", "test", _boxed),
    "math500": KnownSet("HuggingFaceH4/MATH-500", None, "test", _boxed),
    "humaneval": KnownSet("openai/openai_humaneval", None, "test", _code),
    # Upstream's file has rows to prompt, test, validate and train with in one.
    "mbpp": KnownSet("google-research-datasets/mbpp", "sanitized", "test", task_ids=(11, 510)),
    "mt-bench": KnownSet("HuggingFaceH4/mt_bench_prompts", None, "train"),
}


@attrs.frozen
class PromptSet:
    """Prompts to measure on.

    Attributes:
        name: What reports call it.
        source: The file or hub name they are from.
        prompts: What is said.
    """

    name: str
    source: str
    prompts: tuple[Prompt, ...]

    @classmethod
    def of(
        cls, name: str, source: str, prompts: Sequence[Prompt], limit: int | None, draw: int | None
    ) -> "PromptSet":
        """Takes some of the prompts there are.

        Args:
            name: What reports call the set.
            source: Where they are from.
            prompts: All there are.
            limit: How many to take; all when not given.
            draw: Seed to draw them by; the first ones when not given.

        Returns:
            The set.

        Raises:
            InputError: When there are none.
        """
        if not prompts:
            raise InputError(f"{name} ({source}): expected prompts, found none")
        if draw is not None:
            import torch  # for this alone: a set that cannot be read is reported without waiting for it

            generator = torch.Generator().manual_seed(draw)
            prompts = [prompts[index] for index in torch.randperm(len(prompts), generator=generator).tolist()]
        return cls(name, source, tuple(prompts[:limit]))


def set_name(place: str) -> str:
    """What reports call a prompt set.

    Args:
        place: As `open_set` takes it.
    """
    name = place.partition("=")[0]
    return name if name in KNOWN else Path(place).stem


def same_names(places: Sequence[str]) -> str | None:
    """What is wrong with the names of prompt sets: those of one name would be pooled.

    Args:
        places: As `open_set` takes them.

    Returns:
        A sentence for a message; None when nothing is.
    """
    names = list(map(set_name, places))
    twice = sorted({name for name in names if names.count(name) > 1})
    return f"expected sets of different names, found {', '.join(twice)} twice" if twice else None


def open_set(place: str, *, limit: int | None, draw: int | None, reworded: bool = True) -> PromptSet:
    """Reads a prompt set.

    Args:
        place: `NAME=FILE` or `NAME` for a set of `KNOWN`, from a file or from the hub; or any file, as
            `read_prompts` reads them.
        limit: Prompts to take; all when not given.
        draw: Seed to draw them by; the first ones when not given.
        reworded: Word those of a known set as papers do, and take only the rows that they measure on.

    Returns:
        The set.

    Raises:
        InputError: When there is no such set, or it has no prompts.
    """
    name, equals, file = place.partition("=")
    path = Path(file if equals else place)
    if equals and name not in KNOWN:
        raise InputError(f"--prompts {place}: no set is called {name!r}{nearest(name, KNOWN)}")
    known = KNOWN.get(name)
    if known is not None and not equals:
        source, prompts = known.hub, _from_hub(name, known)
    elif equals or os.path.isfile(path):  # False for a name that no file can have, too
        source, faults = str(path), list[str]()
        rows = read_rows(path, faults)
        prompts = prompts_of(rows, source, faults)
        if known is not None and known.task_ids is not None and reworded:
            prompts = prompts_of(_numbered(place, rows, *known.task_ids), source)
    else:
        hint = nearest(place, KNOWN)
        raise InputError(f"--prompts {place}: expected a file or a known set, found neither{hint}")
    if known is not None and reworded:
        prompts = [Prompt(tuple(map(known.word, prompt.turns))) for prompt in prompts]
    return PromptSet.of(set_name(place), source, prompts, limit, draw)


def _numbered(place: str, rows: Mapping[str, Any], first: int, last: int) -> dict[str, Any]:
    """Those of a file's rows that have a task_id in reach, or none."""
    numbers = {where: row.get("task_id") for where, row in rows.items()}
    kept = {
        where: row
        for where, row in rows.items()
        if not isinstance(numbers[where], int) or first <= numbers[where] <= last
    }
    if not kept:
        raise InputError(
            f"--prompts {place}: expected rows with a task_id of {first} to {last}, which papers measure on, "
            f"found {min(numbers.values())} to {max(numbers.values())}; --as-it-is takes all"
        )
    return kept


def _from_hub(name: str, known: KnownSet) -> list[Prompt]:
    try:
        from datasets import load_dataset  # for sets that are not in a file
    except ImportError:
        raise InputError(
            f"--prompts {name}: reading from the hub needs the package datasets (python -m pip "
            f"install datasets); a file works without it: --prompts {name}=FILE"
        ) from None
    try:
        rows = load_dataset(known.hub, known.config, split=known.split)
    except Exception as error:  # of the hub, the network, the disk
        raise InputError(
            f"--prompts {name}: {known.hub} cannot be read from the hub ({first_line(error)}); a file works "
            f"without it: --prompts {name}=FILE"
        ) from None
    return prompts_of({f"row {index}": row for index, row in enumerate(rows, start=1)}, known.hub)
