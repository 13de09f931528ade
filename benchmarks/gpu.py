"""Decoding at the shapes of Qwen3-4B and Qwen3-8B on one GPU: plain and through trees, stage by stage.

    python benchmarks/gpu.py [--models 4b 8b] [--budgets 15,63] [--compile] [--no-lean] [--out gpu.json]

Nothing is downloaded: weights are random (`known_text.py`). Drafting, building, refining, selecting,
verifying and committing are done in earnest, by a DFlash backbone and a SwiGLU refiner of the public shapes;
what the target verifies is a tree of the selected size of which it accepts as much as a published tau says,
to one token a run. A target that writes anything else stops the benchmark.

What a pass has to read, in bfloat16, is all weights but the rows of the embedding that it does not look up,
and keys and values (147 kB a position in both):

| | weights | at 4.8 TB/s (H200) | backbone, refiner | the head, once to build and once to refine |
| --- | --- | --- | --- | --- |
| Qwen3-4B | 8.0 GB | 1.7 ms | 1.1, 0.2 GB | 0.8 GB |
| Qwen3-8B | 15.1 GB | 3.2 ms | 2.1, 0.5 GB | 1.2 GB |

64 rows are about 0.5 and 1 TFLOP, which takes such a GPU less time than the reading. `of limit` is how fast
a pass read these bytes, as a share of what a plain copy on the same device does, measured first.

Arms take turns behind a warm-up. In a round each decodes twice: once timed as a whole, once with a wait for
the GPU behind each stage. Medians over steps are shown. `efficiency` is that of docs/performance.md, the
speedup over `tau * t_plain / t_pass`, the last the target's own pass within "verify". Memory is the most that
was allocated, all networks included.
"""

import argparse
import gc
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
import transformers
from known_text import BLOCK, SHAPES, Shape, Told, emissions, make_drafter, make_refiner, make_target
from rich.console import Console
from rich.table import Table
from timed_passes import TimedPasses, now

from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import InputError
from treeflash.evaluation.memory import MemoryWatch
from treeflash.interfaces import Selector
from treeflash.statistics import StepRecord
from treeflash.target import HuggingFaceTarget
from treeflash.target.loading import torch_device

PLAIN = "plain"
STAGES = ("draft", "build", "refine", "select", "verify", "commit")
BRANCHING, CHILDREN = 16, 16
# Tokens a step with 16 and with 64 nodes, the root counted, on Qwen3-4B; both targets are told the same. A
# chain of DFlash: the mean of its paper's five sets, greedy. 64 nodes: the mean in TreeFlash's ablation,
# without and with its refiner. 16 nodes are not published as such: estimated from what TreeFlash gains over
# DDTree and DFlash there.
TAU = {"dflash": (6.29, 6.29), "ddtree": (7.1, 7.6), "treeflash": (7.6, 8.6)}
WARM_UP_TOKENS, LEAST_STEPS = 16, 4


@attrs.frozen(eq=False)
class Arm:
    """A way to decode, the tau that it is told, and what each of its steps is to emit."""

    decoder: Decoder
    nodes: int
    asked: float
    emitted: Sequence[int]


@attrs.define
class Taken:
    """What was measured of an arm: steps whole and by stage; seconds of passes and prefills; bytes."""

    whole: list[StepRecord] = attrs.field(factory=list)
    staged: list[StepRecord] = attrs.field(factory=list)
    passes: list[float] = attrs.field(factory=list)
    prefill: list[float] = attrs.field(factory=list)
    peak: int = 0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the models one after the other, and prints two tables for each."""
    options = parse(arguments)
    device = options.device
    if not options.cudnn:
        torch.backends.cuda.enable_cudnn_sdp(False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    copying = copy_speed(device)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(f"{name}, torch {torch.__version__}: copies at {copying / 1e9:.0f} GB/s")
    told = {
        key: value if isinstance(value, int | float | list) else str(value)
        for key, value in vars(options).items()
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    found: dict[str, Any] = {}
    whole = {"device": name, **versions, "copy_speed": copying, "options": told, "models": found}
    for model in options.models:
        found[model] = measure(SHAPES[model], options, copying)
        gc.collect()  # before the next model is made
        show(model, found[model], console)
        if options.out is not None:
            options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; ends with status 2 where there is no GPU for what is asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["4b", "8b"])
    parser.add_argument("--budgets", type=numbers, default=[15, 63], help="draft nodes, the root excluded")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=6.0, help="of decoding; a run is cut to its share")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lean", action=switch, default=True, help="our own pass, or the library's forward")
    parser.add_argument("--compile", action=switch, default=False, help="compile our own pass")
    parser.add_argument("--cudnn", action=switch, default=True, help="whether torch may choose its attention")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    try:
        options.device = torch_device(options.device)
    except InputError as error:
        parser.exit(2, f"gpu.py: {error}\n")
    if options.device.type != "cuda" and options.models != ["tiny"]:
        parser.exit(2, "gpu.py: models of this size need a GPU with CUDA; --models tiny runs anywhere\n")
    return options


def numbers(text: str) -> list[int]:
    """Reads `15,63`."""
    return [int(part) for part in text.split(",")]


def copy_speed(device: torch.device) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    copy = torch.zeros_like(source)
    return 2 * source.nbytes / min(timed(lambda: copy.copy_(source), device) for _ in range(5))


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    begin = now(device)
    work()
    return now(device) - begin


def measure(shape: Shape, options: argparse.Namespace, copying: float) -> dict[str, Any]:
    """Times all arms on one target."""
    torch.manual_seed(0)
    target = make_target(shape, options.device, lean=options.lean, compiled=options.compile)
    tokens, start = options.tokens, options.prompt_tokens
    prompt = torch.randint(shape.vocabulary, (start,)).tolist()
    text = prompt + prompt[-1:] * (tokens + 3 * BLOCK)
    arms = make_arms(shape, target, options.budgets, text, start, tokens + BLOCK)
    taken = {name: Taken() for name in arms}
    names, slack = list(arms), itertools.count(2 * BLOCK)
    share = 60 * options.minutes / (len(options.models) * options.rounds * len(arms) * 2)
    for name in names:
        decode(arms[name], text, start, WARM_UP_TOKENS, tokens + next(slack), share, Taken(), staged=False)
    for index, turn in itertools.product(range(options.rounds), range(len(names))):
        name = names[(index + turn) % len(names)]
        for staged in (False, True):
            # The room for the text differs from run to run: what a library plans by shapes and strides is
            # planned anew, as it is for a user's every text, and not found from the run before.
            room = tokens + next(slack)
            decode(arms[name], text, start, tokens, room, share, taken[name], staged=staged)
    read = bytes_of_pass(target, start + tokens // 2)
    plain = median(step.total for step in taken[PLAIN].whole)
    results = {name: summarise(arms[name], taken[name], plain, read, copying) for name in names}
    return {"options": described(target), "bytes_of_pass": read, "arms": results}


def make_arms(
    shape: Shape, target: HuggingFaceTarget, budgets: Sequence[int], text: list[int], start: int, total: int
) -> dict[str, Arm]:
    """Plain decoding, DFlash's chain, and both kinds of tree in each size."""
    drafter, refiner = make_drafter(shape, target), make_refiner(shape, target)

    def arm(kind: str, nodes: int, builder: Any, refiner: Any, selector: Selector) -> Arm:
        small, large = TAU[kind]
        between = small + (large - small) * (log2(nodes + 1) - 4) / 2  # on a line over the logarithm
        tau = max(1.0, min(between, nodes + 1, BLOCK))
        emitted = emissions(tau, total)
        told = Told.of(selector, text, start, emitted, nodes, target, chain=kind == "dflash")
        return Arm(Decoder(TimedPasses(target), drafter, builder, refiner, told), nodes, tau, emitted)

    arms = {PLAIN: Arm(Decoder(TimedPasses(target)), 0, 1.0, emissions(1.0, total))}
    arms[f"dflash-{BLOCK - 1}"] = arm("dflash", BLOCK - 1, Marginal(), NoRefiner(), Chain())
    for nodes in budgets:
        arms[f"ddtree-{nodes}"] = arm("ddtree", nodes, Marginal(), NoRefiner(), OptTree(nodes))
        builder = TopM(BRANCHING, CHILDREN)
        arms[f"treeflash-{nodes}"] = arm("treeflash", nodes, builder, refiner, OptTree(nodes))
    return arms


def decode(
    arm: Arm, text: list[int], start: int, tokens: int, room: int, share: float, taken: Taken, *, staged: bool
) -> None:
    """Decodes until enough is written or the share of time is used up, and checks each step."""
    memory = MemoryWatch.begin(arm.decoder.target.device)
    end, have, records = time.perf_counter() + share, 0, taken.staged if staged else taken.whole
    arm.decoder.target.times = taken.passes if staged else None
    run = arm.decoder.stream(text[:start], max_new_tokens=room, stop_ids=(), time_stages=staged)
    for number, emission in enumerate(run):
        due = arm.emitted[number - 1] if number else 1
        if emission.token_ids != text[start + have : start + have + due]:
            raise RuntimeError(
                f"step {number}: expected {due} tokens of the text, found {emission.token_ids}"
            )
        have += due
        if emission.record is None:
            taken.prefill.append(emission.seconds)
            continue
        records.append(emission.record)
        # Well before the room ends: there, drafts are cut.
        if have > tokens or (number >= LEAST_STEPS and time.perf_counter() > end):
            break
    taken.peak = max(taken.peak, memory.peak() or 0)


def bytes_of_pass(target: HuggingFaceTarget, length: int) -> int:
    """What a pass over a few rows has to read, behind `length` positions."""
    model, config = target.model, target.config
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = sum(weight.nbytes for weight in model.parameters())
    looked_up = 0 if head is embedding else embedding.nbytes
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * length
    return weights - looked_up + cached * target.dtype.itemsize


def summarise(arm: Arm, taken: Taken, plain: float, read: int, copying: float) -> dict[str, Any]:
    """Figures of an arm; times in ms, memory in bytes."""
    records = taken.whole + taken.staged
    tau = sum(record.num_emitted for record in records) / len(records)
    step = median(record.total for record in taken.whole)
    stages = {stage: median(record.seconds.get(stage, 0.0) for record in taken.staged) for stage in STAGES}
    stages["other"] = median(record.total - sum(record.seconds.values()) for record in taken.staged)
    speedup, own = tau * plain / step, median(taken.passes)
    return {
        "nodes": arm.nodes,
        "asked": arm.asked,
        "tau": tau,
        "steps": len(records),
        "tokens_per_second": tau / step,
        "speedup": speedup,
        "efficiency": speedup / (tau * plain / own),
        "pass": 1000 * own,
        "step": 1000 * step,
        "stages": {stage: 1000 * seconds for stage, seconds in stages.items()},
        "prefill": 1000 * median(taken.prefill),
        "read_per_second": read / own,
        "of_limit": read / own / copying,
        "peak": taken.peak,
    }


def described(target: HuggingFaceTarget) -> str:
    """By which pass the target is read, and by what its attention may be computed."""
    words = ["lean" if target.lean is not None else "library", target.attention]
    if target.compiled is not None:
        words.append("compiled")
    if target.device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():
        words.append("cudnn")
    return ", ".join(words)


def show(model: str, found: dict[str, Any], console: Console) -> None:
    """Prints the tables of one target."""
    heads = ("arm", "options", "tau", "tokens/s", "speedup", "t_plain", "t_pass", "efficiency", "GB/s")
    table = Table(*heads, "of limit", "prefill", "peak, GB", title=f"{model} (times in ms)")
    stages = Table("arm", *STAGES, "other", "step as a whole", title=f"{model}: ms of each stage of a step")
    plain = found["arms"][PLAIN]["step"]
    for name, arm in found["arms"].items():
        speeds = [f"{arm[key]:.2f}" for key in ("tau", "tokens_per_second", "speedup")]
        passes = [f"{plain:.2f}", f"{arm['pass']:.2f}", f"{arm['efficiency']:.2f}"]
        reading = [f"{arm['read_per_second'] / 1e9:.1f}", f"{arm['of_limit']:.1%}", f"{arm['prefill']:.1f}"]
        table.add_row(name, found["options"], *speeds, *passes, *reading, f"{arm['peak'] / 1e9:.1f}")
        stages.add_row(name, *(f"{taken:.2f}" for taken in arm["stages"].values()), f"{arm['step']:.2f}")
    console.print(table, stages)


if __name__ == "__main__":
    main()
