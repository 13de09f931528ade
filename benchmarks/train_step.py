"""Training speed and memory, against a plain loop that keeps all logits.

    python benchmarks/train_step.py [--recipe smollm2-train] [--steps 5] [--rounds 2]

All arms train the recipe's drafter on the same made-up texts and states, each in a process of its own, in
turns. The plain loop is what one writes first: a dense mask over the whole row, the logits of all positions
over the whole vocabulary at once (`plain`), or over the recipe's shortlist (`plain-shortlist`).
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from treeflash.components.drafters.dflash_network import Piece
from treeflash.components.trainables.blocks import Blocks
from treeflash.components.trainables.dflash import DFlashTrainable
from treeflash.packed_text import ReadText
from treeflash.places import locate
from treeflash.plugins import Registry
from treeflash.recipe import open_target
from treeflash.trainable import Task, TrainContext
from treeflash.training.texts import Text, pack, passes
from treeflash.training.training_recipe import TrainingRecipe

ARMS = ("treeflash", "plain", "plain-shortlist")
PROMPT, ANSWER = 110, 190  # tokens: about what GSM8K's questions and answers have


def main() -> None:
    """Runs the arms in turns and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="smollm2-train")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm is not None:
        print(json.dumps(run(options.arm, options.recipe, options.steps)))
        return
    best: dict[str, dict[str, float]] = {}
    for _ in range(options.rounds):
        for arm in ARMS:
            command = [sys.executable, __file__, "--arm", arm, "--recipe", options.recipe]
            out = subprocess.run(
                [*command, "--steps", str(options.steps)], check=True, capture_output=True, text=True
            )
            found = json.loads(out.stdout.splitlines()[-1])
            if arm not in best or found["speed"] > best[arm]["speed"]:
                best[arm] = found
    base = best["plain"]
    table = Table("arm", "positions/s", "of plain", "peak memory, GB", "of that training, GB", "of plain")
    for arm, found in best.items():
        table.add_row(
            arm,
            f"{found['speed']:.0f}",
            f"{found['speed'] / base['speed']:.2f}",
            f"{found['peak']:.2f}",
            f"{found['peak'] - found['before']:.2f}",
            f"{(found['peak'] - found['before']) / (base['peak'] - base['before']):.2f}",
        )
    Console().print(table)


def run(arm: str, name: str, steps: int) -> dict[str, float]:
    """Trains for some steps; positions a second, and GB before and at the peak."""
    recipe = TrainingRecipe.load(name, Registry.load())
    target = open_target(recipe.target, Registry.load())
    generator = torch.Generator().manual_seed(0)
    columns = None
    if recipe.loss_settings.shortlist:
        columns = torch.randperm(target.vocab_size, generator=generator)[: recipe.loss_settings.shortlist]
        columns = columns.sort().values
    trainable = recipe.trainable.from_options(
        recipe.trainable_options,
        TrainContext(
            target=target,
            locate=locate,
            loss=recipe.loss.from_options(recipe.loss_options, None),
            columns=None if arm == "plain" else columns,
            frequent=torch.arange,
            refiner=recipe.refiner,
            refiner_options=recipe.refiner_options,
            dtype=torch.float32,
            generator=generator,
        ),
    )
    texts = [
        Text(ids(PROMPT, columns, generator), ids(ANSWER, columns, generator))
        for _ in range(recipe.data.batch_size)
    ]
    rows = []
    for group in passes([text.length for text in texts], recipe.data.length):
        row = pack([texts[index] for index in group], target.device)
        taps = torch.randn(
            row.bounds[-1], len(trainable.tap_layers) * target.hidden_size, generator=generator
        )
        normed = torch.randn(row.bounds[-1], target.hidden_size, generator=generator) * 3
        rows.append(ReadText(row, *(part.to(target.device, target.dtype) for part in (taps, normed))))
    optimizer = torch.optim.AdamW(trainable.parameters(), lr=1e-4, fused=True)
    before = peak()
    positions, begin = 0, time.perf_counter()
    for step in range(steps + 1):
        if step == 1:  # the first one warms up
            positions, begin = 0, time.perf_counter()
        optimizer.zero_grad()
        for read in rows:
            task = trainable.ask(read.text, [generator] * (len(read.text.bounds) - 1))
            loss = trainable(task, read) if arm == "treeflash" else plain(trainable, task, read)
            (loss / task.weight).backward()
            positions += task.positions
        torch.nn.utils.clip_grad_norm_(trainable.parameters(), 1.0)
        optimizer.step()
    return {"speed": positions / (time.perf_counter() - begin), "before": before, "peak": peak()}


def ids(count: int, columns: torch.Tensor | None, generator: torch.Generator) -> list[int]:
    """Made-up tokens."""
    among = columns if columns is not None else torch.arange(1000)
    return among[torch.randint(len(among), (count,), generator=generator)].tolist()


def plain(trainable: DFlashTrainable, task: Task, read: ReadText) -> torch.Tensor:
    """The same loss, written down as it stands in the papers."""
    blocks, text = task.questions.blocks, read.text
    hidden, normed = draft_dense(trainable, blocks, read)
    rows = blocks.rows()
    previous = text.token_ids[rows[:, :-1]].flatten()[:, None]
    columns, head = trainable.comparison.columns, trainable.comparison.head
    lesson = trainable._lesson(hidden.flatten(0, 1), normed.flatten(0, 1), previous, columns)
    p = trainable.target.finish(head(read.normed[rows[:, :-1]].flatten(0, 1)).float()).log_softmax(-1)
    own = head(normed.flatten(0, 1)).float().log_softmax(-1)
    refined = lesson.logits(head, *lesson.rows, *lesson.tables).float().log_softmax(-1)
    losses = sum((p.exp() * (p - q)).sum(-1) for q in (refined, own))
    return (losses * task.questions.weights.flatten().to(losses.device)).sum()


def draft_dense(trainable: DFlashTrainable, blocks: Blocks, read: ReadText) -> list[torch.Tensor]:
    """The backbone under one mask over the whole row."""
    text, size, count = read.text, blocks.block_size, len(blocks.anchors)
    anchors = blocks.anchor_rows
    index = torch.arange(text.bounds[-1], device=anchors.device)
    context = (text.text_of[None] == text.text_of[anchors][:, None]) & (index[None] < anchors[:, None])
    block = torch.arange(count, device=anchors.device).repeat_interleave(size)
    visible = torch.cat([context[block], block[:, None] == block[None]], dim=1)
    firsts = text.token_ids[anchors][:, None]
    slots = torch.cat([firsts, firsts.new_full((count, size - 1), trainable.mask_token_id)], dim=1)
    states = trainable.network.forward_blocks(
        trainable.target.embed(slots).float().flatten(0, 1)[None],
        read.taps[None].float(),
        blocks.positions().flatten()[None],
        text.positions[None],
        [Piece(slice(0, count * size), slice(0, text.bounds[-1]), visible)],
    )
    return [part[0].view(-1, size, part.shape[-1])[:, 1:] for part in states]


def peak() -> float:
    """Most memory this process has had, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    main()
