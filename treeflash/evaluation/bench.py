"""Recipes side by side: one target, the same prompts, one clock, prompt by prompt in turn."""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.engine.audit import LOSSY, Recorded, compare, recorded
from treeflash.engine.stopping import STOP_TOKEN
from treeflash.errors import InputError
from treeflash.evaluation.arms import PLAIN, Arm, measured, weight_places
from treeflash.evaluation.counts import Run, TreeCounts
from treeflash.evaluation.memory import MemoryWatch
from treeflash.evaluation.prompt_sets import PromptSet
from treeflash.hardware import hardware
from treeflash.json_files import located_json
from treeflash.prompts import Prompt
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget
from treeflash.target.text import TextCodec
from treeflash.text_files import decoded
from treeflash.training.folders import begin
from treeflash.training.locks import held

MANIFEST, RUNS = "bench.json", "runs.jsonl"
_IDENTICAL = "identical"
_WARM_UP_TOKENS = 16


@attrs.frozen
class BenchSettings:
    """How answers are decoded.

    Attributes:
        max_new_tokens: Tokens an answer has at most.
        temperature: 0 is greedy.
        seed: Of the draws; the same for all arms, so that their texts are the same.
        time_stages: Wait for a GPU behind each stage, which costs time itself.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    time_stages: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int):
            raise InputError(f"max_new_tokens: expected an integer, found {self.max_new_tokens!r}")
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens: expected at least 1, found {self.max_new_tokens}")
        Draws(self.temperature, self.seed, (0,))  # refuses what cannot be drawn by


@attrs.frozen
class PromptRuns:
    """All answers to one prompt.

    Attributes:
        set_name: The prompt set.
        index: The prompt's place in it.
        key: Its hash.
        runs: For each turn, a run of each arm.
    """

    set_name: str
    index: int
    key: str
    runs: list[Run]

    def to_json(self) -> str:
        """A line of `runs.jsonl`, with a sum of the rest of it."""
        value = attrs.asdict(self)
        return json.dumps({**value, "sha256": _sum(value)})

    @classmethod
    def from_json(cls, text: str, place: str) -> "PromptRuns":
        """Reads a line of `runs.jsonl`.

        Args:
            text: The line.
            place: Where it is from, for messages.

        Raises:
            InputError: When it is not what was written.
        """
        value = located_json(text, place)
        try:
            if value.pop("sha256", None) != _sum(value):
                raise ValueError("its sum is another")
            return cls(**{**value, "runs": [Run.from_json(run) for run in value["runs"]]})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(
                f"{place} is not a measurement ({error}); delete the line, and it is measured again"
            ) from None


@attrs.define(eq=False)
class Bench:
    """A measurement, resumable prompt by prompt.

    Attributes:
        target: The target of all arms.
        arms: What is compared, plain decoding first.
        sets: On what.
        settings: How.
        folder: Where results are kept.
        on_answer: Called with the number of answers done and of all: a turn of a prompt by one arm each.
    """

    target: HuggingFaceTarget
    arms: Sequence[Arm]
    sets: Sequence[PromptSet]
    settings: BenchSettings
    folder: Path
    on_answer: Callable[[int, int], None] = lambda done, total: None

    def run(self) -> list[PromptRuns]:
        """Measures what is not measured yet.

        Returns:
            Everything measured, in the order of the prompts.

        Raises:
            InputError: When the folder was begun with other settings, is in use by another process or cannot
                be written, or a prompt does not fit the target.
        """
        self._check_room()
        with held(self.folder):
            return self._run()

    def _run(self) -> list[PromptRuns]:
        manifest, free = self._manifest(), weight_places(self.arms)
        # What is whole may be looked at on another machine, but not gone on with.
        begin(
            self.folder, MANIFEST, manifest, free | {f"measured_on.{key}" for key in manifest["measured_on"]}
        )
        found = {(line.set_name, line.index): line for line in read_runs(self.folder)}
        wanted = [
            (prompts, index, prompt) for prompts in self.sets for index, prompt in enumerate(prompts.prompts)
        ]
        if any((prompts.name, index) not in found for prompts, index, _ in wanted):
            begin(self.folder, MANIFEST, manifest, free)
            path = self.folder / RUNS
            if path.is_file():  # a last line that was cut off is measured again
                os.truncate(path, len(_whole_lines(path)))
            self._warm_up(wanted[0][2])
        total = len(self.arms) * sum(len(prompt.turns) for _, _, prompt in wanted)
        done = 0
        for prompts, index, prompt in wanted:
            self.on_answer(done, total)
            if (prompts.name, index) not in found:
                answers = map(self.on_answer, itertools.count(done + 1), itertools.repeat(total))
                runs = self._runs(index, prompt, answers.__next__)
                line = PromptRuns(prompts.name, index, prompt.key, runs)
                self._append(line)
                found[prompts.name, index] = line
            done += len(self.arms) * len(prompt.turns)
        self.on_answer(total, total)
        return [found[prompts.name, index] for prompts, index, _ in wanted]

    def _check_room(self) -> None:
        """Refuses what could not be answered, before hours are spent on what stands before it."""
        codec = self.target.require_text()
        for prompts in self.sets:
            headline = f"{prompts.name} ({prompts.source}): prompts too long for the target"
            codec.first_lengths(prompts.prompts, self.target.max_positions, headline)

    def _runs(self, index: int, prompt: Prompt, answered: Callable[[], None]) -> list[Run]:
        """All arms' answers to all turns of a prompt; `answered` is called after each."""
        codec, turns, said = self.target.require_text(), list[Run](), list[str]()
        # Who goes first rotates: what one arm leaves in caches, another finds there.
        order = [self.arms[(index + shift) % len(self.arms)] for shift in range(len(self.arms))]
        for number, text in enumerate(prompt.turns):
            said.append(text)
            prompt_ids = codec.encode_chat(*said)
            if number and len(prompt_ids) >= (self.target.max_positions or math.inf):
                break  # a conversation that has outgrown the target
            answers, runs = dict[str, Recorded](), dict[str, Run]()
            for arm in order:
                answers[arm.name], runs[arm.name] = self._answer(arm, prompt_ids, index, number)
                answered()
            plain = answers[PLAIN]
            draws = Draws(self.settings.temperature, self.settings.seed, (index,))
            for arm in self.arms:
                audit = LOSSY
                if arm.decoder.lossless:
                    audit = compare(answers[arm.name], plain, draws).kind or _IDENTICAL
                turns.append(attrs.evolve(runs[arm.name], audit=audit))
            # Every arm goes on from the same words.
            said.append(said_by(codec, list(plain.generation.token_ids), plain.generation.stop_reason))
        return turns

    def _answer(self, arm: Arm, prompt_ids: list[int], index: int, turn: int) -> tuple[Recorded, Run]:
        trees = TreeCounts()
        memory = MemoryWatch.begin(self.target.device)
        answer = recorded(
            arm.decoder,
            prompt_ids,
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            seed=self.settings.seed,
            sequence=index,
            time_stages=self.settings.time_stages,
            on_emission=trees.see,
        )
        run = Run.of(arm.name, turn, answer.generation, answer.pass_seconds, trees, memory.peak(), _IDENTICAL)
        # What is kept for the audit is none of the next arm's memory.
        return attrs.evolve(answer, logits=[row.cpu() for row in answer.logits]), run

    def _warm_up(self, prompt: Prompt) -> None:
        """Lets every arm do once what it will do often: the first time pays for allocations and kernels."""
        prompt_ids = self.target.require_text().encode_chat(prompt.turns[0])
        for arm in self.arms:
            arm.decoder.generate(prompt_ids, max_new_tokens=_WARM_UP_TOKENS)

    def _append(self, line: PromptRuns) -> None:
        path = self.folder / RUNS
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from None

    def _manifest(self) -> dict[str, Any]:
        return {
            "settings": attrs.asdict(self.settings),
            **measured(self.target, self.arms),
            "measured_on": hardware(self.target.device),
            "sets": {
                prompts.name: {"prompts": len(prompts.prompts), "keys": _keys(prompts)}
                for prompts in self.sets
            },
        }


def read_runs(folder: Path) -> Iterator[PromptRuns]:
    """Reads what was measured.

    Args:
        folder: Of the measurement.

    Yields:
        A prompt's runs, but for a last line that was cut off, or is being written.

    Raises:
        InputError: When the file is broken.
    """
    path = folder / RUNS
    if not path.is_file():
        return
    *lines, _ = decoded(_whole_lines(path), path).split("\n")
    for number, line in enumerate(lines, start=1):
        yield PromptRuns.from_json(line, f"{path}: line {number}")


def _whole_lines(path: Path) -> bytes:
    """A file up to the end of its last whole line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    return data[: data.rfind(b"\n") + 1]


def _sum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def said_by(codec: TextCodec, token_ids: list[int], stop_reason: str | None) -> str:
    """The words of an answer, as they stand in a conversation that goes on.

    Args:
        codec: The target's.
        token_ids: The answer.
        stop_reason: Why it ended; a token that stopped it is none of its words.
    """
    return codec.decode(token_ids[:-1] if stop_reason == STOP_TOKEN else token_ids)


def _keys(prompts: PromptSet) -> str:
    """A hash of all prompts in their order."""
    return Prompt(tuple(prompt.key for prompt in prompts.prompts)).key
