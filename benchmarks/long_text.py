"""The time of a step behind short and long texts, and how much of it is the target's own pass.

    python benchmarks/long_text.py --prompts gsm8k_test.jsonl [--lengths 256,1024,4096] [--rounds 3]

Prompts of the given lengths are made of the file's questions one behind the other. In each round every
length is decoded plainly and with the recipe, for some steps; the target's own pass is timed within each.
All take turns; medians over steps are shown. What a step takes beyond the target's pass should not depend on
the length, but for the drafter's own attention.
"""

import argparse
from collections import defaultdict
from itertools import cycle
from operator import sub
from pathlib import Path
from statistics import median

import attrs
from rich.console import Console
from rich.table import Table
from timed_passes import TimedPasses

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.recipe import Recipe
from treeflash.target import HuggingFaceTarget

_STAGES = ("draft", "build", "refine", "select", "verify", "commit")


def main() -> None:
    """Decodes behind each length in turns and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--recipe", default="smollm2-treeflash")
    parser.add_argument("--lengths", default="256,1024,4096")
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    registry = Registry.load()
    treeflash = Recipe.load(options.recipe, registry).build(registry)
    target: HuggingFaceTarget = treeflash.target  # type: ignore[assignment]  # recipes load no other
    passes = TimedPasses(target)
    treeflash = attrs.evolve(treeflash, target=passes, selector=OptTree(options.nodes))
    arms = {"plain": Decoder(passes), options.recipe: treeflash}
    prompts = {length: _prompt(options.prompts, target, length) for length in lengths}

    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for length in lengths:
            for name, decoder in arms.items():
                steps = options.steps if number else 2  # the first round warms up
                own: list[float] = []
                passes.times = own
                taken = decoder.generate(
                    prompts[length],
                    max_new_tokens=steps * (decoder.drafter.max_depth + 1),
                    stop_ids=(),
                    time_stages=True,
                ).statistics.steps[:steps]
                if number:
                    totals = [step.total for step in taken]
                    found[length, name, "pass"] += own[:steps]
                    found[length, name, "step"] += totals
                    found[length, name, "rest"] += map(sub, totals, own)
                    for stage in _STAGES:
                        found[length, name, stage] += [step.seconds.get(stage, 0.0) for step in taken]
    shown = ("step", "pass", "rest", *_STAGES)
    table = Table("arm", "tokens before", "step, ms", "the target's pass", "all else", *_STAGES)
    for name in arms:
        for length in lengths:
            times = (1000 * median(found[length, name, part]) for part in shown)
            table.add_row(name, str(length), *(f"{value:.1f}" for value in times))
    Console(width=160).print(table)


def _prompt(path: Path, target: HuggingFaceTarget, length: int) -> list[int]:
    """The first questions of a file, as many tokens as wanted."""
    ids: list[int] = []
    for prompt in cycle(read_prompts(path, 200)):
        if len(ids) >= length:
            return ids[:length]
        ids += target.require_text().encode_chat(prompt.turns[0])
    raise SystemExit(f"{path} holds no prompts")


if __name__ == "__main__":
    main()
