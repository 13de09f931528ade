"""Where the time of a step goes, and how near it is to a step in which the target's own pass is all."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.engine import Decoder
from treeflash.evaluation.arms import PLAIN, Arm
from treeflash.evaluation.summary import ArmSummary
from treeflash.evaluation.work import Work, count_work
from treeflash.files import write_atomically

PROFILE = "profile.json"
_REST = "rest"


@attrs.frozen
class Stage:
    """A stage of an average step.

    Attributes:
        name: The stage; "rest" for what lies between the stages.
        seconds: Time.
        work: What it computed and moved.
    """

    name: str
    seconds: float
    work: Work


@attrs.frozen
class Profile:
    """An average step of an arm.

    Attributes:
        arm: Which.
        stages: Its stages, in order.
        seconds: Time of all of it.
        pass_seconds: Time of the target's own pass, a part of "verify".
        efficiency: The measured speedup over the most that trees of these sizes could bring: the tokens of a
            step times the time of a plain step, by that of a pass over a tree. 1 when all else is free.
    """

    arm: str
    stages: Sequence[Stage]
    seconds: float
    pass_seconds: float
    efficiency: float


def profiles(rows: Sequence[ArmSummary], work: Mapping[str, Mapping[str, Work]]) -> list[Profile]:
    """Puts times and work together.

    Args:
        rows: Of one prompt set, plain decoding among them, with times of stages.
        work: By arm and stage, from `count_work`.

    Returns:
        A profile of each arm whose passes were timed.
    """
    plain = next(row for row in rows if row.arm == PLAIN)
    return [
        _profile(row, plain, row.pass_seconds, work[row.arm]) for row in rows if row.pass_seconds is not None
    ]


def work_of(
    arms: Sequence[Arm], rows: Sequence[ArmSummary], token_ids: list[int], max_new_tokens: int
) -> dict[str, dict[str, Work]]:
    """Counts what steps do, along one text.

    Args:
        arms: The arms.
        rows: Of one prompt set. Counting takes time itself, so that trees that go by the clock are counted
            with as many nodes as an average step had.
        token_ids: The prompt.
        max_new_tokens: Of the text.

    Returns:
        By arm and stage.
    """
    nodes = {row.arm: sum(row.nodes) for row in rows}
    return {
        arm.name: count_work(
            _sized(arm.decoder, nodes[arm.name]), token_ids, max_new_tokens=max_new_tokens, stop_ids=()
        )
        for arm in arms
    }


def write_profiles(folder: Path, found: Mapping[str, Sequence[Profile]]) -> None:
    """Writes `profile.json`.

    Args:
        folder: Where to.
        found: By prompt set.

    Raises:
        InputError: When the disk does not take it.
    """
    content = {name: [attrs.asdict(profile) for profile in rows] for name, rows in found.items()}
    write_atomically(folder / PROFILE, json.dumps(content, indent=1) + "\n")


def _sized(decoder: Decoder, nodes: float) -> Decoder:
    selector = decoder.selector
    timeless: Any = selector.without_clock()
    if timeless is selector:
        return decoder
    # Who drafted now and then drafted something.
    budget = max(1, round(nodes)) if nodes else 0
    return attrs.evolve(decoder, selector=attrs.evolve(timeless, budget=budget))


def _profile(row: ArmSummary, plain: ArmSummary, passes: float, work: Mapping[str, Work]) -> Profile:
    step = row.block_efficiency / row.tokens_per_second
    plain_step = plain.block_efficiency / plain.tokens_per_second
    stages = [Stage(name, seconds, work.get(name, Work())) for name, seconds in row.seconds.items()]
    stages.append(Stage(_REST, max(0.0, step - sum(row.seconds.values())), Work()))
    most = row.block_efficiency * plain_step / passes
    return Profile(row.arm, stages, step, passes, row.speedup / most)
