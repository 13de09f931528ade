"""Pictures for reports, as SVG.

Names are a user's own: matplotlib must not read them as formulas, nor leave some out of legends.
"""

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treeflash.evaluation.summary import ArmSummary

Summaries = Mapping[str, Sequence[ArmSummary]]
# What stands for each name.
Legend = dict[str, Any]

_HEIGHT, _WIDTH, _LEGEND = 3.2, 4.6, 0.9
# Pictures side by side: more would be drawn too small to read.
_ACROSS = 3


def efficiency_and_speed(summaries: Summaries) -> str:
    """Block efficiency, and speedup with its interval, by prompt set and arm.

    Args:
        summaries: From `summarise`.

    Returns:
        An SVG element.
    """

    def draw(axes: Any) -> Legend:
        left, right = axes
        names, arms, legend = list(summaries), _arms(summaries), Legend()
        for place, arm in enumerate(arms):
            found = [next((row for row in summaries[name] if row.label == arm), None) for name in names]
            width = 0.8 / len(arms)
            at = [index - 0.4 + (place + 0.5) * width for index in range(len(names))]
            shown = [(x, row) for x, row in zip(at, found, strict=True) if row is not None]
            xs = [x for x, _ in shown]
            legend[arm] = left.bar(xs, [row.block_efficiency for _, row in shown], width)
            speeds = [row.speedup for _, row in shown]
            below = [max(0.0, row.speedup - row.speedup_low) for _, row in shown]
            above = [max(0.0, row.speedup_high - row.speedup) for _, row in shown]
            right.bar(xs, speeds, width, yerr=[below, above], capsize=2)
        right.axhline(1.0, color="0.3", linewidth=0.8)
        for axis, title in (
            (left, "Block efficiency, tokens a step"),
            (right, "Speedup over plain decoding"),
        ):
            axis.set(title=title, xticks=range(len(names)), xticklabels=list(map(_plain, names)))
        return legend

    return _svg(1, 2, draw)


def acceptance(rows: Sequence[ArmSummary]) -> str:
    """How deep steps were accepted, and what trees looked like.

    Args:
        rows: Arms of one prompt set.

    Returns:
        An SVG element.
    """

    def draw(axes: Any) -> Legend:
        left, right = axes
        legend = Legend()
        for row in rows:
            (legend[row.label],) = left.plot(range(1, len(row.accepted) + 1), row.accepted, marker=".")
            right.plot(range(1, len(row.nodes) + 1), row.nodes, marker=".")
        left.set(title="Steps accepted to a depth", xlabel="depth", ylim=(0, 1))
        right.set(title="Nodes of an average tree", xlabel="depth")
        return legend

    return _svg(1, 2, draw)


def ranks(rows: Sequence[ArmSummary]) -> str:
    """How often the target chose a child, by depth and rank among its siblings.

    Args:
        rows: Arms of one prompt set; those without trees are left out.

    Returns:
        An SVG element; nothing without trees.
    """
    drawn = [row for row in rows if row.rank_rates]
    if not drawn:
        return ""
    across = min(_ACROSS, len(drawn))
    down = -(-len(drawn) // across)

    def draw(axes: Any) -> Legend:
        for axis in axes[len(drawn) :]:
            axis.set_axis_off()
        for axis, row in zip(axes[: len(drawn)], drawn, strict=True):
            most = max(sum(rate is not None for rate in rates) for rates in row.rank_rates)
            for rank in range(min(most, 4)):
                rates = [rates[rank] for rates in row.rank_rates]
                axis.plot(range(1, len(rates) + 1), rates, marker=".", label=f"rank {rank + 1}")
            axis.set(title=_plain(row.label), xlabel="depth", ylim=(0, 1))
            axis.legend(fontsize=7)
        return {}

    return _svg(down, across, draw)


def stages(rows: Sequence[ArmSummary]) -> str:
    """What a step's time is made of.

    Args:
        rows: Arms of one prompt set.

    Returns:
        An SVG element; nothing without times of stages.
    """
    # The arm with the most stages has them in the order of a step.
    longest = sorted(rows, key=lambda row: -len(row.seconds))
    names = list(dict.fromkeys(stage for row in longest for stage in row.seconds))
    if not names:
        return ""

    def draw(axes: Any) -> Legend:
        (axis,) = axes
        begin, legend = [0.0] * len(rows), Legend()
        for name in names:
            spent = [1000 * row.seconds.get(name, 0.0) for row in rows]
            legend[name] = axis.barh([_plain(row.label) for row in rows], spent, left=begin)
            begin = [before + more for before, more in zip(begin, spent, strict=True)]
        axis.set(title="An average step, by stage", xlabel="milliseconds")
        axis.invert_yaxis()
        return legend

    return _svg(1, 1, draw)


def by_depth(curves: Mapping[str, Mapping[str, Any]], covers: Sequence[str]) -> str:
    """Distances to the target and coverage, by depth.

    Args:
        curves: Summaries of depths, by what they are called.
        covers: The k of the coverages shown.

    Returns:
        An SVG element.
    """

    def draw(axes: Any) -> Legend:
        legend = Legend()
        for name, curve in curves.items():
            depths = [depth for depth, drafts in enumerate(curve["drafts"], start=1) if drafts]
            found = {key: [curve[key][depth - 1] for depth in depths] for key in ("tvd", "tvd_error")}
            noise = curve.get("sampling_error") or [0.0] * len(curve["tvd"])
            errors = [
                max(error, noise[depth - 1]) for error, depth in zip(found["tvd_error"], depths, strict=True)
            ]
            legend[name] = axes[0].errorbar(depths, found["tvd"], errors, marker=".", capsize=2)
            for axis, most in zip(axes[1:], covers, strict=True):
                axis.plot(depths, [curve["coverage"][most][depth - 1] for depth in depths], marker=".")
        axes[0].set(title="Distance to the target (TVD)", xlabel="depth", ylim=(0, 1))
        for axis, most in zip(axes[1:], covers, strict=True):
            axis.set(title=f"Target's token among the top {most}", xlabel="depth", ylim=(0, 1))
        return legend

    return _svg(1, 1 + len(covers), draw)


def by_budget(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Simulated block efficiency by budget, and how sure drafts were against how right.

    Args:
        arms: Results of each.

    Returns:
        An SVG element.
    """

    def draw(axes: Any) -> Legend:
        left, right = axes
        legend = Legend()
        for name, found in arms.items():
            sizes = [int(size) for size in found["by_budget"]]
            values = list(found["by_budget"].values())
            (legend[name],) = left.plot(sizes or [0], values or [None], marker=".")
            bins = found["calibration"]["bins"]
            right.plot([part["predicted"] for part in bins], [part["accepted"] for part in bins], marker=".")
        right.plot([0, 1], [0, 1], color="0.3", linewidth=0.8)
        left.set_xscale("log", base=2)
        left.set(title="Block efficiency, simulated", xlabel="budget, draft nodes without the root")
        right.set(title="Drafted nodes: predicted and accepted", xlabel="predicted weight", ylim=(0, 1))
        return legend

    return _svg(1, 2, draw)


def _arms(summaries: Summaries) -> list[str]:
    return list(dict.fromkeys(row.label for rows in summaries.values() for row in rows))


def _plain(name: str) -> str:
    return name.replace("$", r"\$")


def _svg(down: int, across: int, draw: Callable[[Any], Legend]) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # only for reports

    # Text stays text, and the same figures give the same file.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "treeflash", "font.size": 9}):
        figure = Figure(figsize=(_WIDTH * across, _HEIGHT * down), layout="constrained")
        axes = figure.subplots(down, across, squeeze=False).flatten()
        legend = draw(axes)
        for axis in axes:
            axis.grid(alpha=0.25)
            axis.set_axisbelow(True)
        if legend:
            figure.set_figheight(_HEIGHT * down + _LEGEND)
            # Labels on the artists themselves would be passed over where they begin with an underscore.
            names = list(map(_plain, legend))
            figure.legend(list(legend.values()), names, loc="outside lower center", ncols=4, fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    # For those who hear the page.
    titles = html.escape("; ".join(filter(None, (axis.get_title().replace("\n", " ") for axis in axes))))
    return drawn[drawn.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{titles}"', 1)
