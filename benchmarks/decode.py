"""Decodes the same prompts with several recipes, interleaved, on one target in one process.

    python benchmarks/decode.py --prompts gsm8k_test.jsonl --limit 20

Prompts are JSON lines with a key `question` or `prompt`. The first recipe is what the others are compared
with. Speeds are of decoding, the prefill apart. `--dtype float32` compares the texts too: in low precision a
tree and a single row round differently, and near-ties may fall either way.
"""

import argparse
import json
import statistics
from collections import defaultdict

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from treeflash.plugins import Registry
from treeflash.recipe import Recipe, parse_overrides

RECIPES = ["smollm2-plain", "smollm2-dflash", "smollm2-ddtree", "smollm2-treeflash"]


def arguments():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=RECIPES, help="name, or name:table.key=value,...")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--judge", action="store_true", help="also compare with transformers' generate")
    return parser.parse_args()


def read_prompts(path, limit):
    """Takes the first prompts of a file of JSON lines."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(limit), strict=False)]
    return [row.get("question", row.get("prompt")) for row in rows]


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
    prompts = [target.text.encode_chat(prompt) for prompt in read_prompts(options.prompts, options.limit)]
    runs, equal, agree = defaultdict(list), defaultdict(int), 0
    names = list(decoders)
    for name in names:  # warm-up
        decoders[name].generate(prompts[0], max_new_tokens=32)
    for index, ids in enumerate(track(prompts, console=Console(stderr=True))):
        turn = index % len(names)
        texts = {}
        for name in names[turn:] + names[:turn]:
            result = decoders[name].generate(
                ids, max_new_tokens=options.max_new_tokens, temperature=options.temperature, sequence=index
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


def report(names, runs, equal, count):
    """Prints pooled block efficiency, median speeds and the median of each prompt's speed-up."""
    table = Table(
        "recipe", "tau", "tokens/s", "speed-up", "ms/step", "draft", "build", "refine", "select", "verify"
    )
    table.add_column("commit")
    table.add_column("same text")
    base = [run.tokens_per_second for run in runs[names[0]]]
    for name in names:
        steps = [step for run in runs[name] for step in run.statistics.steps]
        speeds = [run.tokens_per_second for run in runs[name]]
        stages = defaultdict(float)
        for run in runs[name]:
            for stage, seconds in run.statistics.seconds_per_stage.items():
                stages[stage] += seconds * 1000 / len(steps)
        decode = sum(run.statistics.decode_seconds for run in runs[name])
        table.add_row(
            name,
            f"{sum(step.num_emitted for step in steps) / len(steps):.2f}",
            f"{statistics.median(speeds):.1f}",
            f"{statistics.median(a / b for a, b in zip(speeds, base, strict=True)):.2f}",
            f"{decode * 1000 / len(steps):.1f}",
            *(f"{stages[stage]:.1f}" for stage in ("draft", "build", "refine", "select", "verify", "commit")),
            f"{equal[name]}/{count}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
