"""Where a bench's answers part from plain decoding, judged once more by the model in float32.

    python benchmarks/near_ties.py paper greedy --prompts inputs --out study

Takes a study's `[bench.NAME]` that has been measured. Wherever an arm's text parts from plain decoding's, the
model reads the text up to there in float32; printed is how far the two tokens are apart, and how far any
other is above both. In bfloat16 two nearly equal tokens may fall either way; anything else would be a fault.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from rich.progress import track

from treeflash.engine.stopping import STOP_TOKEN
from treeflash.evaluation.arms import PLAIN
from treeflash.evaluation.bench import PromptRuns, read_runs
from treeflash.evaluation.study import Study
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.recipe import Recipe
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget


def main() -> None:
    """Looks at every place once and prints a line for each prompt set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study")
    parser.add_argument("bench")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    words = parser.parse_args()
    registry = Registry.load()
    plan = StudyPlan.load(registry.study(words.study), registry)
    bench = plan.benches[words.bench]
    study = Study(plan, registry, words.prompts, words.out)
    sets = {given.name: given.prompts for given in study.sets(bench)}
    recipe = next(arm.recipe for arm in plan.arms.values() if arm.recipe is not None)
    tables = {"target": {**plan.target, "dtype": "float32", "lean": False}}
    target = Recipe.load(recipe, registry, tables).load_target(registry)
    assert isinstance(target, HuggingFaceTarget)
    found = defaultdict[str, list[tuple[float, float]]](list)
    lines = list(read_runs(words.out / "bench" / words.bench))
    for line in track(lines, "prompts", transient=True):
        draws = Draws(bench.temperature, 0, (line.index,))
        found[line.set_name] += parted(target, line, sets[line.set_name][line.index], draws)
    for name, places in found.items():
        apart, below = zip(*places, strict=True)
        print(
            f"{name}: {len(places)} answers part; their two tokens are {median(apart):.3f} apart in the "
            f"median, {max(apart):.3f} at most; another is above both by {max(below):.3f} at most"
        )


def parted(
    target: HuggingFaceTarget, line: PromptRuns, prompt: Prompt, draws: Draws
) -> list[tuple[float, float]]:
    """Judges a prompt's answers.

    Args:
        target: The model, in float32.
        line: The answers.
        prompt: To this.
        draws: How they were chosen.

    Returns:
        For each that parts from plain decoding's: between its two scores, and from the best to both.
    """
    codec, said, found = target.require_text(), list[str](), list[tuple[float, float]]()
    seen: dict[tuple[int, ...], tuple[float, float]] = {}
    for turn, text in enumerate(prompt.turns):
        runs = {run.arm: run for run in line.runs if run.turn == turn}
        if not runs:
            break
        said.append(text)
        plain = runs[PLAIN]
        prompt_ids = codec.encode_chat(*said)
        for run in runs.values():
            pairs = zip(run.token_ids, plain.token_ids, strict=False)
            place = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), None)
            if place is None:
                continue
            two = (run.token_ids[place], plain.token_ids[place])
            if (turn, place, *two) not in seen:
                ids = [*prompt_ids, *plain.token_ids[:place]]
                seen[turn, place, *two] = _judged(target, ids, two, draws)
            found.append(seen[turn, place, *two])
        kept = plain.token_ids[:-1] if plain.stop_reason == STOP_TOKEN else plain.token_ids
        said.append(codec.decode(kept))
    return found


@torch.inference_mode()
def _judged(
    target: HuggingFaceTarget, ids: list[int], two: tuple[int, int], draws: Draws
) -> tuple[float, float]:
    state = target.start(1, len(ids) + 1, ())
    logits = target.prefill(state, torch.tensor([ids], device=target.device)).logits[0, -1]
    scores = draws.scores(logits[: target.vocab_size], len(ids) - 1)
    pair = scores[list(two)]
    return float((pair[0] - pair[1]).abs()), float(scores.max() - pair.max())


if __name__ == "__main__":
    main()
