"""What a first use shows: the shipped recipe beside plain decoding and trees of fixed sizes.

    python benchmarks/first_impression.py [--dtype float32] [--prompts FILE --limit 8] [--max-new-tokens 96]

All arms share a target and take turns prompt by prompt in one process, after a warm-up; speeds are of
decoding, without the prefill. `ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2` shows a processor with
AVX2 alone.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from treeflash.engine import Decoder
from treeflash.hardware import hardware
from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.recipe import Recipe
from treeflash.statistics import StepRecord

PROMPTS = (
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts does it take in all?",
    "Tom has 12 apples, gives 5 to Ann and buys 8 more. How many apples has he now? Think step by step.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "What are the causes of the First World War?",
    "Compose a short travel blog post about a trip to Hawaii.",
    "List ten animals and say in a sentence each where they live.",
)
PLAIN = "plain"
SIZES = (4, 8, 15)


@attrs.define
class Arm:
    """A decoder, and what it did."""

    decoder: Decoder
    tokens: int = 0
    seconds: float = 0.0
    steps: list[StepRecord] = attrs.field(factory=list)

    def answer(self, prompt: list[int], tokens: int) -> None:
        """Answers a prompt, and counts."""
        found = self.decoder.generate(prompt, max_new_tokens=tokens).statistics
        self.tokens += found.num_emitted
        self.seconds += found.decode_seconds
        self.steps += found.steps

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def main() -> None:
    """Runs the arms in turns and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="smollm2-treeflash")
    parser.add_argument("--dtype", help="in place of the recipe's")
    parser.add_argument("--prompts", type=Path, help="in place of six that are built in")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    words = parser.parse_args()
    registry = Registry.load()
    told = {} if words.dtype is None else {"target": {"dtype": words.dtype}}
    shipped = Recipe.load(words.recipe, registry, told)
    target = shipped.load_target(registry)

    def arm(overrides: Mapping[str, Mapping[str, Any]]) -> Arm:
        return Arm(Recipe.load(words.recipe, registry, {**told, **overrides}).build(registry, target))

    fixed = {f"{size} nodes": {"use": "opt-tree", "budget": size, "depth": 7} for size in SIZES}
    arms = {
        PLAIN: Arm(Decoder(target)),
        **{name: arm({"selector": options}) for name, options in fixed.items()},
        words.recipe: arm({}),
    }
    codec = target.require_text()
    given = [prompt.turns[0] for prompt in read_prompts(words.prompts)] if words.prompts else list(PROMPTS)
    prompts = [codec.encode_chat(text) for text in given[: words.limit]]
    names = list(arms)
    for name in names:
        arms[name].decoder.generate(prompts[0], max_new_tokens=16)
    for index, prompt in enumerate(prompts):
        for turn in range(len(names)):
            arms[names[(index + turn) % len(names)]].answer(prompt, words.max_new_tokens)

    console = Console()
    console.print(f"{str(target.dtype).removeprefix('torch.')}, {hardware(target.device)}")
    costs = getattr(arms[words.recipe].decoder.selector, "costs", None)
    if costs is not None:
        taken = costs.up_to(max(SIZES), 128)
        console.print(
            "ms of a pass over 0, 1, ... nodes:", " ".join(f"{1000 * value:.0f}" for value in taken)
        )
    table = Table("arm", "tokens/s", "of plain", "of 8 nodes", "tau", "steps that drafted", "nodes")
    for name, one in arms.items():
        drafted = [step.num_drafted for step in one.steps if step.tried]
        table.add_row(
            name,
            f"{one.speed:.1f}",
            f"{one.speed / arms[PLAIN].speed:.2f}",
            f"{one.speed / arms['8 nodes'].speed:.2f}",
            f"{one.tokens / len(one.steps):.2f}",
            f"{len(drafted) / len(one.steps):.0%}",
            f"{sum(drafted) / max(1, len(drafted)):.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
