"""Two pictures of a run: its loss, and what its drafts would have been worth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treeflash.errors import InputError

_SIZE = (7.0, 4.0)


def draw(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Draws `loss.png` and `acceptance.png`.

    Args:
        folder: Of the run.
        lines: Its record.

    Raises:
        InputError: When the disk does not take them.
    """
    try:
        _draw(folder, lines)
    except OSError as error:
        raise InputError(f"{folder}: the pictures cannot be written ({error.strerror})") from None


def _draw(folder: Path, lines: Sequence[dict[str, Any]]) -> None:
    from matplotlib.figure import Figure  # only at the end of a run

    steps = [line for line in lines if "loss" in line]
    measured = [line for line in lines if "heldout" in line]
    if steps:
        figure = Figure(figsize=_SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.plot([line["step"] for line in steps], _smooth([line["loss"] for line in steps]))
        axes.set(xlabel="step", ylabel="training loss, nats", title="Loss (running mean)")
        axes.grid(alpha=0.3)
        figure.savefig(folder / "loss.png", dpi=120)
    if measured:
        figure = Figure(figsize=(2 * _SIZE[0], _SIZE[1]), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name in measured[-1]["heldout"]:
            summary = [line["heldout"][name] for line in measured]
            left.plot(
                [line["step"] for line in measured],
                [part["block_efficiency"] for part in summary],
                marker=".",
                label=name,
            )
            top1 = summary[-1]["top1"]
            right.plot(range(1, len(top1) + 1), top1, marker=".", label=name)
        left.set(xlabel="step", ylabel="tokens a step, drafting a chain", title="Held-out block efficiency")
        right.set(xlabel="depth", ylabel="share", title="Likeliest token is the target's", ylim=(0, 1))
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(folder / "acceptance.png", dpi=120)


def _smooth(values: Sequence[float]) -> list[float]:
    """A running mean over a fiftieth of the run."""
    width = max(1, len(values) // 50)
    smoothed, total = [], 0.0
    for index, value in enumerate(values):
        total += value - (values[index - width] if index >= width else 0.0)
        smoothed.append(total / min(index + 1, width))
    return smoothed
