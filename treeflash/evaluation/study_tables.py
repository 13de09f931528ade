"""The tables of a study's file, each checked by itself."""

from typing import Any

import attrs
from attrs.validators import and_, deep_iterable, ge, le, optional

from treeflash.ranges import MAX_SEED, MOST_NODES, even

_AT_LEAST_ONE = optional(ge(1))


def _some(instance: Any, attribute: "attrs.Attribute[list[str]]", value: list[str]) -> None:
    if not value:
        raise ValueError(f"'{attribute.name}' must be one or more: {value!r}")


@attrs.frozen
class AnswersPlan:
    """`[answers]`: what drafters learn from, and are looked at along.

    Attributes:
        recipe: Its target answers.
        prompts: Files, in the folder of prompt files.
        limit: Rows of each.
        max_new_tokens: Of an answer.
        temperature: 0 is greedy.
        heldout: Share held out.
    """

    recipe: str
    prompts: list[str] = attrs.field(validator=_some)
    limit: int | None = attrs.field(default=None, validator=_AT_LEAST_ONE)
    max_new_tokens: int = attrs.field(default=256, validator=ge(1))
    temperature: float = attrs.field(default=0.0, validator=ge(0))
    heldout: float = attrs.field(default=0.02, validator=and_(ge(0), le(1)))


@attrs.frozen
class TrainingPlan:
    """`[trained.NAME]`: a drafter to train.

    Attributes:
        recipe: A training recipe.
        set: What is laid over it, as `-o` takes it.
        start: Another training, whose drafter this one begins with.
        states: Name of a folder for the target's states; trainings that tap the same layers share one.
    """

    recipe: str
    set: list[str] = attrs.field(factory=list)
    start: str | None = None
    states: str | None = None


@attrs.frozen
class ArmPlan:
    """`[arms.NAME]`: something to measure, one of both.

    Attributes:
        recipe: A recipe.
        trained: A training, by the recipe that it leaves.
        set: What is laid over it, as `-o` takes it.
    """

    recipe: str | None = None
    trained: str | None = None
    set: list[str] = attrs.field(factory=list)


@attrs.frozen
class BenchPlan:
    """`[bench.NAME]`: arms side by side.

    Attributes:
        prompts: Prompt sets, as `treeflash bench --prompts` takes them, files in the folder of prompt files.
        limit: Prompts of each.
        draw: Seed to draw them by; the first ones when not given.
        max_new_tokens: Of an answer.
        temperature: 0 is greedy.
        arms: Which; all when not given.
    """

    prompts: list[str] = attrs.field(validator=_some)
    limit: int | None = attrs.field(default=None, validator=_AT_LEAST_ONE)
    draw: int | None = attrs.field(default=None, validator=optional(and_(ge(0), le(MAX_SEED))))
    max_new_tokens: int = attrs.field(default=128, validator=ge(1))
    temperature: float = attrs.field(default=0.0, validator=ge(0))
    arms: list[str] | None = attrs.field(default=None, validator=optional(_some))


@attrs.frozen
class EvalPlan:
    """`[eval.NAME]`: drafts along the answers held out.

    Attributes:
        arms: Which; all when not given.
        answers: Those to which files of `[answers]`; to all when not given.
        limit: Answers at most.
        anchors: Drafts compared in each.
        paths: Paths sampled for the true marginal.
        budgets: Budgets to simulate.
        real: Answers to decode for real too.
    """

    arms: list[str] | None = attrs.field(default=None, validator=optional(_some))
    answers: list[str] | None = attrs.field(default=None, validator=optional(_some))
    limit: int | None = attrs.field(default=None, validator=_AT_LEAST_ONE)
    anchors: int = attrs.field(default=8, validator=ge(0))
    paths: int = attrs.field(default=16, validator=and_(ge(0), even))
    budgets: list[int] = attrs.field(
        factory=lambda: [4, 8, 15, 31, 63, 127],
        validator=deep_iterable(and_(ge(1), le(MOST_NODES))),
    )
    real: int = attrs.field(default=0, validator=ge(0))
