"""Where a bench's answers part from plain decoding, judged once more by the model in float32.

    python benchmarks/near_ties.py paper greedy --prompts inputs --out study

Takes a study's `[bench.NAME]` that has been measured. Wherever an arm's text parts from plain decoding's, the
model reads the text up to there in float32; printed is how far the two tokens are apart, how far any other is
above both, and how far the logits of such places spread. In bfloat16 two nearly equal tokens may fall either
way; anything else would be a fault.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import attrs
import torch
from rich.progress import track

from treeflash.engine.audit import parting
from treeflash.errors import InputError
from treeflash.evaluation.arms import PLAIN
from treeflash.evaluation.bench import MANIFEST, PromptRuns, read_runs, said_by
from treeflash.evaluation.study import Study
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.recipe import Recipe
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget
from treeflash.training.folders import read_manifest


@attrs.frozen
class Parting:
    """A place where an answer parts from plain decoding's.

    Attributes:
        apart: Between the scores of the two tokens.
        below: From the best score to the better of both.
        spread: Standard deviation of the place's logits.
    """

    apart: float
    below: float
    spread: float


def main() -> None:
    """Looks at every place once and prints a line for each prompt set, and one for all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study")
    parser.add_argument("bench")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    registry = Registry.load()
    plan = StudyPlan.load(words.study, registry).only([f"bench.{words.bench}"])
    found = judge(plan, words.bench, registry, words.prompts, words.out)
    for name, partings in {**found, "all": [each for of in found.values() for each in of]}.items():
        print(f"{name}: {len(partings)} answers part")
        if partings:
            apart, below = ([getattr(each, of) for each in partings] for of in ("apart", "below"))
            print(f"  two tokens are {max(apart):.3f} apart at most, {median(apart):.3f} in the median")
            print(f"  another is above both by {max(below):.3f} at most")
            print(f"  logits spread by {mean(each.spread for each in partings):.1f}")


def judge(
    plan: StudyPlan, bench: str, registry: Registry, inputs: Path, out: Path
) -> dict[str, list[Parting]]:
    """Judges a measurement.

    Args:
        plan: A study of this measurement alone.
        bench: Its name.
        registry: What is installed.
        inputs: Folder of the prompt files.
        out: The study's folder.

    Returns:
        By prompt set, each answer that parts.

    Raises:
        InputError: When it was not measured, or on other prompts.
    """
    folder = out / "bench" / bench
    settings = read_manifest(folder, MANIFEST, "a folder of a bench")["settings"]
    study = Study(plan, registry, inputs, out)
    sets = {given.name: given.prompts for given in study.sets(plan.benches[bench])}
    lines = list(read_runs(folder))
    for line in lines:
        prompts = sets[line.set_name]
        if line.index >= len(prompts) or prompts[line.index].key != line.key:
            where = f"{line.set_name} {line.index}"
            raise InputError(f"{folder}: measured on other prompts than {inputs} has, {where} for one")
    tables = {"target": {**plan.target, "dtype": "float32", "lean": False}}
    recipes = [part.recipe for part in (plan.answers, *plan.arms.values()) if part is not None]
    recipe = next(recipe for recipe in recipes if recipe is not None)
    target = Recipe.load(recipe, registry, tables).load_target(registry)
    assert isinstance(target, HuggingFaceTarget)
    found: dict[str, list[Parting]] = {name: [] for name in sets}
    for line in track(lines, "prompts", transient=True):
        draws = Draws(settings["temperature"], settings["seed"], (line.index,))
        found[line.set_name] += parted(target, line, sets[line.set_name][line.index], draws)
    return found


def parted(target: HuggingFaceTarget, line: PromptRuns, prompt: Prompt, draws: Draws) -> Iterator[Parting]:
    """Judges a prompt's answers.

    Args:
        target: The model, in float32.
        line: The answers.
        prompt: To this.
        draws: How they were chosen.

    Yields:
        Each that parts from plain decoding's.
    """
    codec, said = target.require_text(), list[str]()
    for turn, text in enumerate(prompt.turns):
        runs = {run.arm: run for run in line.runs if run.turn == turn}
        if not runs:
            break  # the conversation had outgrown the target
        said.append(text)
        plain = runs[PLAIN]
        prompt_ids, seen = codec.encode_chat(*said), dict[tuple[int, int], Parting]()
        for run in runs.values():
            place = parting(run.token_ids, plain.token_ids)
            if place is None:
                continue
            other = run.token_ids[place]
            if (place, other) not in seen:
                ids = [*prompt_ids, *plain.token_ids[:place]]
                seen[place, other] = _judged(target, ids, [other, plain.token_ids[place]], draws)
            yield seen[place, other]
        said.append(said_by(codec, plain.token_ids, plain.stop_reason))


@torch.inference_mode()
def _judged(target: HuggingFaceTarget, ids: list[int], two: list[int], draws: Draws) -> Parting:
    state = target.start(1, len(ids) + 1, ())
    logits = target.prefill(state, torch.tensor([ids], device=target.device)).logits[0, -1]
    scores = draws.scores(logits, len(ids) - 1)
    pair = scores[two]
    return Parting(
        float((pair[0] - pair[1]).abs()), float(scores.max() - pair.max()), float(logits.float().std())
    )


if __name__ == "__main__":
    main()
