"""The time of a step behind short and long texts, and how much of it is the target's own pass.

    python benchmarks/long_text.py --prompts gsm8k_test.jsonl [--lengths 256,1024,4096] [--rounds 3]

Prompts of the given lengths are made of the file's questions one behind the other. In each round every
length is decoded plainly and with the recipe, for some steps; beside them the target alone reads trees of
that size behind as many tokens. All take turns; medians over steps are shown. What a step takes beyond the
target's pass should not depend on the length, but for the drafter's own attention.
"""

import argparse
import time
from collections import defaultdict
from itertools import cycle
from pathlib import Path
from statistics import median

import attrs
import torch
from rich.console import Console
from rich.table import Table

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.recipe import Recipe
from treeflash.target import HuggingFaceTarget
from treeflash.tree import TokenTree

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
    treeflash = attrs.evolve(treeflash, selector=OptTree(options.nodes))
    target: HuggingFaceTarget = treeflash.target  # type: ignore[assignment]  # recipes load no other
    arms = {"plain": Decoder(target), options.recipe: treeflash}
    prompts = {length: _prompt(options.prompts, target, length) for length in lengths}

    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for number in range(options.rounds + 1):
        for length in lengths:
            for name, decoder in arms.items():
                steps = options.steps if number else 2  # the first round warms up
                taken = decoder.generate(
                    prompts[length],
                    max_new_tokens=steps * (decoder.drafter.max_depth + 1),
                    stop_ids=(),
                    time_stages=True,
                ).statistics.steps[:steps]
                alone = _passes_alone(
                    target, prompts[length], 1 if name == "plain" else options.nodes + 1, steps
                )
                if number:
                    found[length, name, "alone"] += alone
                    found[length, name, "step"] += [step.total for step in taken]
                    for stage in _STAGES:
                        found[length, name, stage] += [step.seconds.get(stage, 0.0) for step in taken]
    table = Table("arm", "tokens before", "step, ms", *_STAGES, "its pass alone", "step but for verify")
    for name in arms:
        for length in lengths:
            times = {part: median(found[length, name, part]) * 1000 for part in ("step", "alone", *_STAGES)}
            row = [times["step"], *(times[stage] for stage in _STAGES), times["alone"]]
            rest = times["step"] - times["verify"]
            table.add_row(name, str(length), *(f"{value:.1f}" for value in row), f"{rest:.1f}")
    Console(width=160).print(table)


def _prompt(path: Path, target: HuggingFaceTarget, length: int) -> list[int]:
    """The first questions of a file, as many tokens as wanted."""
    ids: list[int] = []
    for prompt in cycle(read_prompts(path, 200)):
        if len(ids) >= length:
            return ids[:length]
        ids += target.require_text().encode_chat(prompt.turns[0])
    raise SystemExit(f"{path} holds no prompts")


@torch.inference_mode()
def _passes_alone(target: HuggingFaceTarget, prompt: list[int], size: int, count: int) -> list[float]:
    """Seconds of passes over a chain of this size behind the prompt."""
    state = target.start(1, len(prompt) + size, ())
    target.prefill(state, torch.tensor([prompt], device=target.device))
    tree = TokenTree.from_lists(prompt[-size:], list(range(-1, size - 1)), device=target.device)
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        target.verify(state, tree).logits[0, -1, 0].item()
        seconds.append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    main()
