"""From runs to figures: counts are pooled as counts, never averaged as averages."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from treeflash.evaluation.arms import PLAIN
from treeflash.evaluation.bench import PromptRuns
from treeflash.evaluation.counts import Run, TreeCounts

_RESAMPLES = 2000
_LEVEL = 0.95


@attrs.frozen
class ArmSummary:
    """One arm on one prompt set.

    Attributes:
        arm: Which.
        prompts: Prompts measured.
        new_tokens: Tokens written, those of the prefill included.
        steps: Verification passes.
        block_efficiency: Tokens that the steps emitted, by the steps.
        tokens_per_second: The same tokens, by the time of decoding.
        prefill_seconds: Time to read an average prompt.
        speedup: Tokens per second against plain decoding.
        speedup_low: Lower end of its confidence interval (95 %, bootstrap over prompts).
        speedup_high: Upper end.
        accepted: Share of the steps that accepted to depth 1, 2, ...
        rank_rates: By depth and rank among siblings: how often the target chose a child, where there was one.
        nodes: Nodes at depth 1, 2, ... in an average step.
        seconds: Time of each stage in an average step.
        peak_bytes: Most memory in use; None when it cannot be told.
        audit: Answers by how they compare with plain decoding.
    """

    arm: str
    prompts: int
    new_tokens: int
    steps: int
    block_efficiency: float
    tokens_per_second: float
    prefill_seconds: float
    speedup: float
    speedup_low: float
    speedup_high: float
    accepted: list[float]
    rank_rates: list[list[float | None]]
    nodes: list[float]
    seconds: dict[str, float]
    peak_bytes: int | None
    audit: dict[str, int]


def summarise(lines: Sequence[PromptRuns]) -> dict[str, list[ArmSummary]]:
    """Makes figures of runs.

    Args:
        lines: All runs, of all sets.

    Returns:
        By prompt set, a summary of each arm, plain decoding first.
    """
    sets: dict[str, list[PromptRuns]] = {}
    for line in lines:
        sets.setdefault(line.set_name, []).append(line)
    found = {}
    for name, prompts in sets.items():
        arms = list(dict.fromkeys(run.arm for line in prompts for run in line.runs))
        work = {
            arm: torch.tensor([_work(line, arm) for line in prompts], dtype=torch.float64) for arm in arms
        }
        found[name] = [_arm(arm, prompts, work) for arm in arms]
    return found


def _work(line: PromptRuns, arm: str) -> tuple[float, float]:
    """Tokens that an arm's steps emitted for a prompt, and their seconds."""
    runs = [run for run in line.runs if run.arm == arm]
    return float(sum(sum(run.emitted) for run in runs)), sum(run.decode_seconds for run in runs)


def _arm(arm: str, prompts: Sequence[PromptRuns], work: Mapping[str, torch.Tensor]) -> ArmSummary:
    runs = [run for line in prompts for run in line.runs if run.arm == arm]
    accepted = [count for run in runs for count in run.accepted]
    steps, emitted = len(accepted), sum(sum(run.emitted) for run in runs)
    seconds = sum(run.decode_seconds for run in runs)
    deepest = max((depth for run in runs for depth in run.depth), default=0)
    trees = sum((run.trees for run in runs), TreeCounts())
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    low, high = _interval(work[arm], work[PLAIN])
    return ArmSummary(
        arm=arm,
        prompts=len(prompts),
        new_tokens=sum(len(run.token_ids) for run in runs),
        steps=steps,
        block_efficiency=_ratio(emitted, steps),
        tokens_per_second=_ratio(emitted, seconds),
        prefill_seconds=_ratio(sum(run.prefill_seconds for run in runs), len(runs)),
        speedup=float(_speedup(work[arm].sum(0), work[PLAIN].sum(0)).nan_to_num(nan=0.0, posinf=0.0)),
        speedup_low=low,
        speedup_high=high,
        accepted=[
            _ratio(sum(count >= depth for count in accepted), steps) for depth in range(1, deepest + 1)
        ],
        rank_rates=_rates(trees),
        nodes=[_ratio(count, steps) for count in trees.nodes],
        seconds={
            stage: _ratio(sum(run.seconds.get(stage, 0.0) for run in runs), steps) for stage in _stages(runs)
        },
        peak_bytes=max(peaks, default=None),
        audit={kind: sum(run.audit == kind for run in runs) for kind in sorted({run.audit for run in runs})},
    )


def _interval(mine: torch.Tensor, plain: torch.Tensor) -> tuple[float, float]:
    """Where the speedup lies when other prompts of the kind had been drawn."""
    count = len(mine)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(count, (_RESAMPLES, count), generator=generator)
    speedups = _speedup(mine[drawn].sum(1), plain[drawn].sum(1))
    # Answers of the prefill's token alone have no speed, and neither has a draw of nothing else.
    speedups = speedups[speedups.isfinite()]
    if not len(speedups):
        return 0.0, 0.0
    ends = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    low, high = torch.quantile(speedups.float(), ends).tolist()
    return low, high


def _speedup(mine: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Of sums `[..., 2]` of tokens and seconds; not finite where nothing was decoded."""
    return (mine[..., 0] / mine[..., 1]) / (plain[..., 0] / plain[..., 1])


def _rates(trees: TreeCounts) -> list[list[float | None]]:
    return [
        [accepted / offered if offered else None for accepted, offered in zip(*rows, strict=True)]
        for rows in zip(trees.accepted, trees.offered, strict=True)
    ]


def _stages(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(stage for run in runs for stage in run.seconds))


def _ratio(amount: float, count: float) -> float:
    return amount / count if count else 0.0


def as_json(summaries: Mapping[str, Sequence[ArmSummary]]) -> dict[str, Any]:
    """Summaries as `results.json` holds them."""
    return {name: [attrs.asdict(arm) for arm in arms] for name, arms in summaries.items()}
