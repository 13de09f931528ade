"""From runs to figures: counts are pooled as counts, never averaged as averages."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from treeflash.engine.audit import LOSSY, MISMATCH, NEAR_TIE
from treeflash.errors import InputError, nearest
from treeflash.evaluation.arms import PLAIN
from treeflash.evaluation.bench import PromptRuns
from treeflash.evaluation.counts import Run, TreeCounts

_RESAMPLES = 2000
_LEVEL = 0.95
# Speedup over tokens a step: what the clock's noise may add on a quiet machine.
_POSSIBLE = 1.15


@attrs.frozen
class ArmSummary:
    """One arm on one prompt set.

    Attributes:
        arm: Which.
        prompts: Prompts measured.
        new_tokens: Tokens written, those of the prefill included.
        steps: Verification passes.
        block_efficiency: Tokens that the steps emitted, by the steps.
        block_efficiency_low: Lower end of its confidence interval (95 %, bootstrap over prompts).
        block_efficiency_high: Upper end.
        tokens_per_second: The same tokens, by the time of decoding.
        prefill_seconds: Time to read an average prompt.
        speedup: Tokens per second against plain decoding.
        speedup_low: Lower end of its confidence interval.
        speedup_high: Upper end.
        accepted: Share of the steps that accepted to depth 1, 2, ...
        rank_rates: By depth and rank among siblings: how often the target chose a child, where there was one.
        nodes: Nodes at depth 1, 2, ... in an average step.
        seconds: Time of each stage in an average step.
        pass_seconds: Time of the target's own pass in one, a part of "verify"; None when it was not measured.
        peak_bytes: Most memory in use; None when it cannot be told.
        audit: Answers by how they compare with plain decoding.
    """

    arm: str
    prompts: int
    new_tokens: int
    steps: int
    block_efficiency: float
    block_efficiency_low: float
    block_efficiency_high: float
    tokens_per_second: float
    prefill_seconds: float
    speedup: float
    speedup_low: float
    speedup_high: float
    accepted: list[float]
    rank_rates: list[list[float | None]]
    nodes: list[float]
    seconds: dict[str, float]
    pass_seconds: float | None
    peak_bytes: int | None
    audit: dict[str, int]

    @property
    def label(self) -> str:
        """What tables and pictures call it: its name, and whether its verifier is lossy."""
        return f"{self.arm} ({LOSSY})" if LOSSY in self.audit else self.arm

    @property
    def speedup_interval(self) -> str:
        """The speedup's interval, as tables show it: one prompt has none."""
        return "-" if self.prompts < 2 else f"{self.speedup_low:.2f} to {self.speedup_high:.2f}"

    @property
    def acceptance_interval(self) -> str:
        """The block efficiency's interval, as tables show it: one prompt has none."""
        return (
            "-"
            if self.prompts < 2
            else f"{self.block_efficiency_low:.2f} to {self.block_efficiency_high:.2f}"
        )

    @property
    def disturbance(self) -> str | None:
        """Why the speedup cannot be right, in a sentence; None if it can.

        A step takes at least as long as one of plain decoding, so no arm is faster than its tokens a step.
        """
        if self.speedup <= _POSSIBLE * self.block_efficiency:
            return None
        return (
            f"{self.label}: a speedup of {self.speedup:.2f} with {self.block_efficiency:.2f} tokens a step "
            "is not possible: something else slowed plain decoding down; measure again into another folder"
        )

    @property
    def audit_counts(self) -> list[str]:
        """Answers that were the same, nearly tied and wrong, as tables show them."""
        kinds = ("identical", NEAR_TIE, MISMATCH)
        return ["-" if LOSSY in self.audit else str(self.audit.get(kind, 0)) for kind in kinds]


def summarise(lines: Sequence[PromptRuns]) -> dict[str, list[ArmSummary]]:
    """Makes figures of runs.

    Args:
        lines: All runs, of all sets.

    Returns:
        By prompt set, a summary of each arm, plain decoding first.
    """
    found = {}
    for name, prompts in _by_set(lines).items():
        arms = list(dict.fromkeys(run.arm for line in prompts for run in line.runs))
        work = {arm: _work(prompts, arm) for arm in arms}
        found[name] = [_arm(arm, prompts, work) for arm in arms]
    return found


@attrs.frozen
class Ratio:
    """One arm over another.

    Attributes:
        value: The ratio.
        low: Lower end of its confidence interval (95 %, bootstrap over prompts, the same for both arms).
        high: Upper end.
    """

    value: float
    low: float
    high: float


def ratios(lines: Sequence[PromptRuns], arm: str, other: str) -> dict[str, tuple[Ratio, Ratio]]:
    """Compares two arms prompt by prompt.

    Args:
        lines: All runs, of all sets.
        arm: One.
        other: What it is compared with.

    Returns:
        By prompt set, and under "mean" for the mean over all sets, the ratios of block efficiencies and of
        tokens per second.

    Raises:
        InputError: When an arm was not measured.
    """
    measured = dict.fromkeys(run.arm for line in lines for run in line.runs)
    for name in (arm, other):
        if name not in measured:
            raise InputError(f"no arm is called {name!r}{nearest(name, measured)}")
    whole, drawn = [], []
    sets = _by_set(lines)
    for number, prompts in enumerate(sets.values()):
        mine, theirs = _work(prompts, arm), _work(prompts, other)
        picked = _picked(len(prompts), number)
        whole.append(_over(mine.sum(0), theirs.sum(0)))
        drawn.append(_over(mine[picked].sum(1), theirs[picked].sum(1)))
    names = [*sets, "mean"]
    values, draws = ([*of, torch.stack(of).mean(dim=0)] for of in (whole, drawn))
    return {
        name: (Ratio(float(value[0]), *_ends(draw[0])), Ratio(float(value[1]), *_ends(draw[1])))
        for name, value, draw in zip(names, values, draws, strict=True)
    }


def _by_set(lines: Sequence[PromptRuns]) -> dict[str, list[PromptRuns]]:
    sets: dict[str, list[PromptRuns]] = {}
    for line in lines:
        sets.setdefault(line.set_name, []).append(line)
    return sets


def _work(prompts: Sequence[PromptRuns], arm: str) -> torch.Tensor:
    """Tokens that an arm's steps emitted for each prompt, their seconds, and the steps: float64 `[n, 3]`."""
    found = []
    for line in prompts:
        runs = [run for run in line.runs if run.arm == arm]
        emitted = [count for run in runs for count in run.emitted]
        found.append((sum(emitted), sum(run.decode_seconds for run in runs), len(emitted)))
    return torch.tensor(found, dtype=torch.float64)


def _arm(arm: str, prompts: Sequence[PromptRuns], work: Mapping[str, torch.Tensor]) -> ArmSummary:
    runs = [run for line in prompts for run in line.runs if run.arm == arm]
    accepted = [count for run in runs for count in run.accepted]
    steps, emitted = len(accepted), sum(sum(run.emitted) for run in runs)
    seconds = sum(run.decode_seconds for run in runs)
    deepest = max((depth for run in runs for depth in run.depth), default=0)
    trees = sum((run.trees for run in runs), TreeCounts())
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    # An answer that the prefill ended has no passes to time.
    stepped = [run for run in runs if run.emitted]
    passes = [run.pass_seconds for run in stepped if run.pass_seconds is not None]
    picked = _picked(len(prompts))
    mine, plain = work[arm][picked].sum(1), work[PLAIN][picked].sum(1)
    tau_low, tau_high = _ends(_per_step(mine))
    low, high = _ends(_per_second(mine) / _per_second(plain))
    speedup = _per_second(work[arm].sum(0)) / _per_second(work[PLAIN].sum(0))
    return ArmSummary(
        arm=arm,
        prompts=len(prompts),
        new_tokens=sum(len(run.token_ids) for run in runs),
        steps=steps,
        block_efficiency=_ratio(emitted, steps),
        block_efficiency_low=tau_low,
        block_efficiency_high=tau_high,
        tokens_per_second=_ratio(emitted, seconds),
        prefill_seconds=_ratio(sum(run.prefill_seconds for run in runs), len(runs)),
        speedup=float(speedup.nan_to_num(nan=0.0, posinf=0.0)),
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
        pass_seconds=_ratio(sum(passes), steps) if passes and len(passes) == len(stepped) else None,
        peak_bytes=max(peaks, default=None),
        audit={kind: sum(run.audit == kind for run in runs) for kind in sorted({run.audit for run in runs})},
    )


def _picked(count: int, seed: int = 0) -> torch.Tensor:
    """Prompts drawn anew, as many as there are, again and again: int64 `[resamples, count]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (_RESAMPLES, count), generator=generator)


def _ends(values: torch.Tensor) -> tuple[float, float]:
    """Where a figure lies when other prompts of the kind had been drawn."""
    # Answers of the prefill's token alone have no speed, and neither has a draw of nothing else.
    values = values[values.isfinite()]
    if not len(values):
        return 0.0, 0.0
    ends = torch.tensor([(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    low, high = torch.quantile(values.float(), ends).tolist()
    return low, high


def _per_second(work: torch.Tensor) -> torch.Tensor:
    """Tokens per second of sums as `_work` has them; not finite where nothing was decoded."""
    return work[..., 0] / work[..., 1]


def _per_step(work: torch.Tensor) -> torch.Tensor:
    """Tokens per step, in the same way."""
    return work[..., 0] / work[..., 2]


def _over(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Ratios of tokens per step, and of tokens per second: `[2, ...]`."""
    return torch.stack([per(mine) / per(theirs) for per in (_per_step, _per_second)])


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
