"""An evaluation along texts as one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeflash.evaluation import charts
from treeflash.evaluation.evaluate import MARGINAL, curves
from treeflash.evaluation.page import document, table
from treeflash.files import write_atomically

REPORT = "eval.html"
_SHOWN_COVERS = ("1", "5")

_STEPS = """
<p>Steps are simulated along the texts, at each arm's own budget. Expected is what the weights of the drafted
nodes add up to in a step, found how many were accepted; real is block efficiency of the
texts decoded once more, simulated that of the same ones; in low precision not all are written alike.</p>
"""
_NOTES = """
<p>Distances are total variations between a draft's distribution of a position and the target's, given what
it wrote before. The backbone knows the text up to the anchor alone; the refined distribution is given the
true previous token as well; the true marginal is the best that can be said without it: the target's own
distributions averaged over sampled paths. Bars are standard errors over drafts, or the sampling error where
that is larger.</p>
"""


def write_page(folder: Path, results: Mapping[str, Any]) -> Path:
    """Writes `eval.html`.

    Args:
        folder: Where it goes.
        results: From `evaluate`.

    Returns:
        The page.

    Raises:
        InputError: When the disk does not take it.
    """
    write_atomically(folder / REPORT, page(results))
    return folder / REPORT


def page(results: Mapping[str, Any]) -> str:
    """Makes the page.

    Args:
        results: From `evaluate`.

    Returns:
        HTML.
    """
    return document("treeflash eval", facts(results), sections(results))


def facts(results: Mapping[str, Any]) -> str:
    """How an evaluation was made, in a line.

    Args:
        results: From `evaluate`.
    """
    settings = results["settings"]
    which = "all" if settings["split"] is None else settings["split"]
    said = f"{results['texts']} texts ({which}), {settings['anchors']} drafts compared in each"
    if MARGINAL in results:
        said += f", {settings['paths']} paths for the true marginal"
    return said


def sections(results: Mapping[str, Any]) -> list[str]:
    """What the page holds.

    Args:
        results: From `evaluate`.

    Returns:
        HTML, one below the other.
    """
    arms = results["arms"]
    parts = [charts.by_budget(arms), _STEPS, _steps(arms), _budgets(arms)]
    measured = curves(dict(results))
    if measured:
        parts += ["<h2>By depth</h2>", _NOTES, charts.by_depth(measured, _SHOWN_COVERS)]
        parts += [_distances(measured), _coverage(measured)]
    return parts


def _steps(arms: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, found in arms.items():
        real, sure = found.get("real"), found["calibration"]
        rows.append(
            (
                name,
                "none" if found["budget"] is None else str(found["budget"]),
                f"{found['block_efficiency']:.2f}",
                f"{sure['expected_accepted']:.2f} / {sure['accepted']:.2f}",
                "not run" if real is None else f"{real['block_efficiency']:.2f} / {real['simulated']:.2f}",
                "" if real is None else f"{real['same_texts']} of {real['texts']}",
            )
        )
    heads = (
        "arm",
        "budget",
        "block efficiency",
        "accepted: expected / found",
        "real / simulated",
        "same text",
    )
    return table(heads, rows)


def _budgets(arms: Mapping[str, Mapping[str, Any]]) -> str:
    sizes = list(dict.fromkeys(size for found in arms.values() for size in found["by_budget"]))
    if not sizes:
        return ""
    rows = []
    for name, found in arms.items():
        values = [found["by_budget"].get(size) for size in sizes]
        rows.append((name, *_cells(values, 2)))
    return table(("block efficiency with a budget of", *sizes), rows)


def _distances(measured: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [(name, *_cells(found["tvd"], 3)) for name, found in measured.items()]
    return table(("TVD at depth", *_depths(measured)), _filled(rows))


def _coverage(measured: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        (f"{name}, top {most}", *_cells(covered, 2))
        for name, found in measured.items()
        for most, covered in found["coverage"].items()
    ]
    return table(("coverage at depth", *_depths(measured)), _filled(rows))


def _cells(values: Sequence[float | None], digits: int) -> list[str]:
    return ["" if value is None else f"{value:.{digits}f}" for value in values]


def _depths(measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    deepest = max(len(found["tvd"]) for found in measured.values())
    return [str(depth) for depth in range(1, deepest + 1)]


def _filled(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    width = max(map(len, rows))
    return [(*row, *[""] * (width - len(row))) for row in rows]
