"""Recipes along texts the target wrote: distributions, calibration, simulated and real steps."""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from treeflash.engine.step import proposed
from treeflash.errors import InputError
from treeflash.evaluation.arms import PLAIN, Arm, refuse_lossy
from treeflash.evaluation.depths import DepthMeasure, distributions
from treeflash.evaluation.marginal import true_marginal
from treeflash.evaluation.simulation import Simulation, Tally
from treeflash.evaluation.texts import Text, conditionals, read_texts
from treeflash.files import write_atomically
from treeflash.json_files import read_json
from treeflash.ranges import even
from treeflash.target import HuggingFaceTarget
from treeflash.target.own_logits import require_own_logits
from treeflash.training.answers import Split
from treeflash.types import BlockDraft, Limits

RESULTS = "eval.json"
MARGINAL = "true marginal"


@attrs.frozen
class EvalSettings:
    """What is measured.

    Attributes:
        split: Part of the texts; all when None.
        limit: Texts at most.
        anchors: Drafts a text whose distributions are compared, spread over its answer.
        paths: Paths sampled behind an anchor for the true marginal, an even number; 0 leaves it out.
        budgets: Budgets to simulate.
        real: Texts that are decoded for real too, to see how far the simulation is off.
        seed: Of the paths.
    """

    split: Split | None = "heldout"
    limit: int | None = None
    anchors: int = 8
    paths: int = attrs.field(default=16, validator=even)
    budgets: tuple[int, ...] = (4, 8, 15, 31, 63, 127)
    real: int = 0
    seed: int = 0


@attrs.define(eq=False)
class _ArmMeasure:
    """What is known of one arm so far."""

    arm: Arm
    simulation: Simulation
    depths: dict[str, DepthMeasure] = attrs.field(factory=dict)
    simulated: Tally = attrs.field(factory=Tally)
    real: Tally = attrs.field(factory=Tally)
    decoded: int = 0
    same_texts: int = 0


def evaluate(
    target: HuggingFaceTarget,
    arms: Sequence[Arm],
    folder: Path,
    settings: EvalSettings,
    on_text: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Measures recipes along texts.

    Args:
        target: The target of all.
        arms: Recipes; plain decoding is passed over.
        folder: A data directory of this target.
        settings: What is measured.
        on_text: Called with the number of texts done.

    Returns:
        Results as JSON holds them.

    Raises:
        InputError: When the folder has no texts of this target, or an arm's verifier is lossy on purpose.
        UnsupportedTargetError: When its distributions cannot be made of its hidden states.
    """
    refuse_lossy(arms)
    measures = [
        _ArmMeasure(arm, Simulation(arm.decoder, settings.budgets))
        for arm in map(_without_clock, arms)
        if arm.name != PLAIN
    ]
    layers = sorted({layer for part in measures for layer in part.arm.decoder.drafter.tap_layers})
    depth = max((part.arm.decoder.drafter.max_depth for part in measures), default=0)
    paths = settings.paths if depth else 0  # of arms that draft something
    marginal, noise = DepthMeasure(depth), torch.zeros(depth, dtype=torch.float64)
    texts = read_texts(folder, target, layers, split=settings.split, limit=settings.limit)
    generator = torch.Generator().manual_seed(settings.seed)
    compares = bool(paths) or any(part.arm.decoder.drafter.drafts_blocks for part in measures)
    count = 0
    for number, text in enumerate(texts):
        if compares and number == 0:
            require_own_logits(target, text.token_ids)
        places = _anchors(text, settings.anchors)
        for part in measures:
            part.simulation.follow(target, text)
            _compare(part, target, text, places)
            if number < settings.real:
                _decode(part, target, text)
        if paths:
            for place in places:
                noise += _add_marginal(marginal, target, text, place, paths, generator)
        count = number + 1
        on_text(count)
    results: dict[str, Any] = {
        "settings": attrs.asdict(settings),
        "texts": count,
        "arms": {part.arm.name: _arm_summary(part) for part in measures},
    }
    if paths:
        found = marginal.summary()
        # The average of two halves is off by about half of what they are apart.
        found["sampling_error"] = marginal.known(noise / (2 * marginal.count))
        results[MARGINAL] = found
    return results


def write_results(folder: Path, results: dict[str, Any]) -> Path:
    """Writes `eval.json`, with a sum of what it holds.

    Args:
        folder: Where it goes.
        results: From `evaluate`.

    Returns:
        The file.

    Raises:
        InputError: When the disk does not take it.
    """
    write_atomically(folder / RESULTS, json.dumps({**results, "sha256": _sum(results)}, indent=1) + "\n")
    return folder / RESULTS


def read_results(folder: Path) -> dict[str, Any]:
    """Reads `eval.json`.

    Args:
        folder: Where it is.

    Returns:
        What `evaluate` gave.

    Raises:
        InputError: When it is not what was written.
    """
    path = folder / RESULTS
    results = read_json(path, InputError)
    if results.pop("sha256", None) != _sum(results):
        raise InputError(f"{path}: not what was written; delete it to have it measured again")
    return results


def _sum(results: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(results).encode()).hexdigest()


def _anchors(text: Text, most: int) -> list[int]:
    """Places of anchors, spread over an answer; behind each is at least one token."""
    first, last = text.first, len(text.token_ids) - 2
    if last < first:
        return []
    return sorted(set(torch.linspace(first, last, min(most, last - first + 1)).long().tolist()))


@torch.inference_mode()
def _compare(part: _ArmMeasure, target: HuggingFaceTarget, text: Text, places: Sequence[int]) -> None:
    """Compares the distributions of drafts at some anchors with the target's."""
    decoder = part.arm.decoder
    drafter = decoder.drafter
    if not drafter.drafts_blocks:
        return  # one that drafts token by token has none of its own for a position
    ids, depth = text.token_ids, drafter.max_depth
    state = drafter.start(1, len(ids) + depth)
    known = 0
    for place in places:
        taps = [text.states[layer][known:place] for layer in drafter.tap_layers]
        seen = torch.cat(taps, dim=-1)[None] if taps else None
        drafter.extend(state, ids[None, known:place], seen, torch.tensor([place - known]))
        known = place
        draft = proposed(drafter, state, ids[None, place - 1 : place + 1], Limits(1, depth))
        assert isinstance(draft, BlockDraft), "its drafts_blocks is true"
        written = ids[place + 1 : place + 1 + draft.depth]
        true = conditionals(target, text, torch.arange(place, place + len(written), device=ids.device))
        # Behind the end of the text any token does: what is drafted there is not looked at.
        padded = torch.cat([ids[place - 1 : place + 1 + draft.depth], ids.new_zeros(draft.depth)])
        for name, drafted in distributions(decoder, draft, padded[: 2 + draft.depth]).items():
            measure = part.depths.setdefault(name, DepthMeasure(depth))
            measure.add(drafted[: len(written)], true, written)


def _add_marginal(
    marginal: DepthMeasure,
    target: HuggingFaceTarget,
    text: Text,
    place: int,
    paths: int,
    generator: torch.Generator,
) -> Tensor:
    """Compares the true marginal at an anchor with the conditional along the text."""
    ids = text.token_ids
    written = ids[place + 1 : place + 1 + marginal.depth]
    found, apart = true_marginal(target, ids[: place + 1], len(written), paths, generator)
    true = conditionals(target, text, torch.arange(place, place + len(written), device=ids.device))
    marginal.add(found, true, written)
    noise = torch.zeros(marginal.depth, dtype=torch.float64)
    noise[: len(written)] = apart.double().cpu()
    return noise


def _decode(part: _ArmMeasure, target: HuggingFaceTarget, text: Text) -> None:
    """Decodes a text for real, and simulates the same one alone."""
    answer = text.token_ids[text.first :].tolist()
    generation = part.arm.decoder.generate(
        text.token_ids[: text.first],
        max_new_tokens=len(answer),
        on_emission=part.real.see,
        **text.settings,
    )
    part.decoded += 1
    part.same_texts += list(generation.token_ids) == answer
    alone = Simulation(part.arm.decoder, ())
    alone.follow(target, text)
    part.simulated.steps += alone.own.steps
    part.simulated.emitted += alone.own.emitted


def _without_clock(arm: Arm) -> Arm:
    """The same arm with trees that do not go by the time of steps: a simulation's take none."""
    decoder = arm.decoder
    return attrs.evolve(arm, decoder=attrs.evolve(decoder, selector=decoder.selector.without_clock()))


def _arm_summary(part: _ArmMeasure) -> dict[str, Any]:
    simulation = part.simulation
    selector = part.arm.decoder.selector
    found: dict[str, Any] = {
        "block_efficiency": simulation.own.block_efficiency,
        "budget": getattr(selector, "budget", None),
        "by_budget": {str(size): tally.block_efficiency for size, tally in simulation.by_budget.items()},
        "calibration": simulation.calibration.summary(),
        "depths": {name: measure.summary() for name, measure in part.depths.items()},
    }
    if part.real.steps:
        found["real"] = {
            "block_efficiency": part.real.block_efficiency,
            "simulated": part.simulated.block_efficiency,
            "texts": part.decoded,
            "same_texts": part.same_texts,
        }
    return found


def curves(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every distribution that was measured, by what to call it.

    Args:
        results: From `evaluate`.

    Returns:
        Summaries of `DepthMeasure`; a distribution that several arms share is there once, one that nothing
        was compared with is not.
    """
    found: dict[str, dict[str, Any]] = {}
    for (arm, part), name in itertools.product(results["arms"].items(), ("backbone", "refined")):
        measured = part["depths"].get(name)
        if measured is not None and measured not in found.values():
            found[f"{arm}: {name}"] = measured
    if any(results.get(MARGINAL, {}).get("drafts", ())):
        found[MARGINAL] = results[MARGINAL]
    return found
