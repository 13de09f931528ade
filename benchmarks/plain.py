"""Plain decoding, one sequence: the library's own `generate`, its forward in our loop, and our pass.

    python benchmarks/plain.py --prompts gsm8k_test.jsonl [--limit 8] [--max-new-tokens 128] [--compile]

They take turns prompt by prompt in one process, behind a warm-up; speeds are total tokens over total time,
the prefill included for all. It is what speedups of drafts are measured against. `--compile` adds our pass as
`target.compile` makes it, before the first turn: for thirty layers that may take half an hour.
"""

import argparse
import time
from pathlib import Path

import attrs
import torch
from rich.console import Console
from rich.table import Table

from treeflash.engine import Decoder
from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.recipe import Recipe, open_target
from treeflash.target import HuggingFaceTarget


def main() -> None:
    """Runs the arms in turns and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--recipe", default="smollm2-plain")
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    registry = Registry.load()
    told = Recipe.load(options.recipe, registry).target
    lean = open_target(told, registry)
    own = open_target(attrs.evolve(told, lean=False), registry)
    prompts = [
        lean.require_text().encode_chat(prompt.turns[0])
        for prompt in read_prompts(options.prompts, options.limit)
    ]

    def library(ids: list[int], count: int) -> list[int]:
        row = torch.tensor([ids], device=lean.device)
        mask = torch.ones_like(row)
        made = own.model.generate(row, attention_mask=mask, max_new_tokens=count, do_sample=False)
        return made[0, len(ids) :].tolist()

    def ours(target: HuggingFaceTarget, ids: list[int], count: int) -> list[int]:
        return list(Decoder(target).generate(ids, max_new_tokens=count).token_ids)

    arms = {
        "transformers generate": library,
        "its forward in our loop": lambda ids, count: ours(own, ids, count),
        "our pass": lambda ids, count: ours(lean, ids, count),
    }
    if options.compile:
        compiled = open_target(attrs.evolve(told, compile=True), registry)
        arms["our pass, compiled"] = lambda ids, count: ours(compiled, ids, count)
    names, tokens, seconds = list(arms), dict.fromkeys(arms, 0), dict.fromkeys(arms, 0.0)
    for name in names:
        arms[name](prompts[0], 8)
    for index, ids in enumerate(prompts):
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
            begin = time.perf_counter()
            tokens[name] += len(arms[name](ids, options.max_new_tokens))
            seconds[name] += time.perf_counter() - begin
    table = Table("arm", "tokens/s", "of generate")
    base = tokens[names[0]] / seconds[names[0]]
    for name in names:
        speed = tokens[name] / seconds[name]
        table.add_row(name, f"{speed:.1f}", f"{speed / base:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
