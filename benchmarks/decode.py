"""Decodes the same prompts with several recipes, interleaved, on one target in one process.

    python benchmarks/decode.py --prompts gsm8k_test.jsonl --limit 20

Prompts are JSON lines in the forms that `treeflash regenerate` reads. The first recipe is what the others are
compared with. Speeds are of decoding, the prefill apart; a speed-up is the ratio of total throughputs. In low
precision a tree and a single row round differently, and near-ties may fall either way; with `--dtype float32`
or `float64` a text that differs is an error, and the exit status is 1.
"""

import argparse
import sys
from collections import defaultdict

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.recipe import Recipe
from treeflash.recipe_tables import parse_overrides

STAGES = ("draft", "build", "refine", "select", "verify", "commit")
RECIPES = ["smollm2-plain", "smollm2-dflash", "smollm2-ddtree", "smollm2-treeflash"]


def arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, help="name, or name:table.key=value,...")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--judge", action="store_true", help="also compare with transformers' greedy generate"
    )
    options = parser.parse_args()
    if options.judge and options.temperature > 0:
        parser.error("--judge compares greedy texts: leave --temperature at 0")
    return options


def load(names, dtype):
    """Builds the decoders of all recipes around one target."""
    registry = Registry.load()
    decoders, target = {}, None
    for name in names:
        recipe, _, changes = name.partition(":")
        tables = parse_overrides([change for change in changes.split(",") if change])
        tables.setdefault("target", {})["dtype"] = dtype
        decoders[name] = Recipe.load(recipe, registry, tables).build(registry, target)
        target = decoders[name].target
    return decoders, target


@torch.inference_mode()
def judged(target, ids, options):
    """What transformers itself writes, greedily."""
    row = torch.tensor([ids], device=target.device)
    return target.model.generate(row, max_new_tokens=options.max_new_tokens, do_sample=False)[
        0, len(ids) :
    ].tolist()


def main():
    """Runs the arms and prints a table."""
    options = arguments()
    decoders, target = load(options.recipes, options.dtype)
    prompts = [
        target.text.encode_chat(prompt.turns[0]) for prompt in read_prompts(options.prompts, options.limit)
    ]
    runs, equal, agree = defaultdict(list), defaultdict(int), 0
    names = list(decoders)
    for name in names:  # warm-up
        decoders[name].generate(prompts[0], max_new_tokens=32)
    for index, ids in enumerate(track(prompts, console=Console(stderr=True))):
        turn = index % len(names)
        texts = {}
        for name in names[turn:] + names[:turn]:
            result = decoders[name].generate(
                ids,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                seed=options.seed,
                sequence=index,
            )
            runs[name].append(result)
            texts[name] = list(result.token_ids)
        for name in names:
            equal[name] += texts[name] == texts[names[0]]
        if options.judge:
            agree += texts[names[0]] == judged(target, ids, options)
    report(names, runs, equal, len(prompts))
    if options.judge:
        print(f"{names[0]} equals transformers' generate on {agree} of {len(prompts)} prompts")
        equal["generate"] = agree
    exact = options.dtype in ("float32", "float64")
    sys.exit(exact and any(count < len(prompts) for count in equal.values()))


def report(names, runs, equal, count):
    """Prints pooled block efficiency and speeds, and the time of a step and its stages in ms."""
    columns = ("recipe", "tau", "tokens/s", "speed-up", "step", *STAGES, "same text")
    table = Table(*columns)
    base = None
    for name in names:
        steps = [step for run in runs[name] for step in run.statistics.steps]
        stages = defaultdict(float)
        for run in runs[name]:
            for stage, seconds in run.statistics.seconds_per_stage.items():
                stages[stage] += seconds * 1000 / len(steps)
        emitted = sum(step.num_emitted for step in steps)
        seconds = sum(run.statistics.decode_seconds for run in runs[name])
        base = base or emitted / seconds
        table.add_row(
            name,
            f"{emitted / len(steps):.2f}",
            f"{emitted / seconds:.1f}",
            f"{emitted / seconds / base:.2f}",
            f"{seconds * 1000 / len(steps):.1f}",
            *(f"{stages[stage]:.1f}" for stage in STAGES),
            f"{equal[name]}/{count}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
