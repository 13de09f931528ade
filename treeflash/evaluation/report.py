"""A measurement as one page: tables and pictures, nothing to be loaded from elsewhere."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treeflash.evaluation import charts
from treeflash.evaluation.summary import ArmSummary, as_json
from treeflash.training.folders import write_atomically

RESULTS, REPORT = "results.json", "report.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330 }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d9dde5 }
p.facts { color: #5a6475; margin-top: .2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #e6e9ef } th { font-weight: 600 }
th:first-child, td:first-child { text-align: left }
td { white-space: nowrap } tr.best td { background: #eef6ee }
table.text td, table.text th { text-align: left; white-space: normal }
svg { max-width: 100%; height: auto } .bad { color: #a3262a; font-weight: 600 }
"""

_NOTES = """
Block efficiency is tokens emitted by verification passes over those passes, pooled over all steps; the
token of the prefill and everything past a stop are not counted. Speed is those tokens over the time of
decoding, the first draft included and the prefill apart. Speedup is the ratio of total speeds, with its
95 % interval over prompts drawn anew. Budgets do not count the root.
"""


def write_report(
    folder: Path, summaries: Mapping[str, Sequence[ArmSummary]], manifest: Mapping[str, Any]
) -> Path:
    """Writes `results.json` and `report.html`.

    Args:
        folder: Of the measurement.
        summaries: From `summarise`.
        manifest: What was measured.

    Returns:
        The page.

    Raises:
        InputError: When the disk does not take them.
    """
    results = {"measured": dict(manifest), "results": as_json(summaries)}
    write_atomically(folder / RESULTS, json.dumps(results, indent=1) + "\n")
    write_atomically(folder / REPORT, page(summaries, manifest))
    return folder / REPORT


def page(summaries: Mapping[str, Sequence[ArmSummary]], manifest: Mapping[str, Any]) -> str:
    """Makes the page.

    Args:
        summaries: From `summarise`.
        manifest: What was measured.

    Returns:
        HTML.
    """
    settings, target = manifest["settings"], manifest["target"]
    facts = (
        f"{target['dtype']} on {target['device']}, temperature {settings['temperature']}, up to "
        f"{settings['max_new_tokens']} new tokens, seed {settings['seed']}"
    )
    parts = [
        f"<h1>treeflash bench</h1><p class=facts>{html.escape(facts)}</p>",
        charts.efficiency_and_speed(summaries),
        f"<p>{_NOTES}</p>",
    ]
    for name, rows in summaries.items():
        prompts = rows[0].prompts
        parts += [
            f"<h2>{html.escape(name)}</h2><p class=facts>{prompts} prompts</p>",
            _table(rows),
            charts.acceptance(rows),
            "<p>How often the target chose a child, by its rank among its siblings:</p>",
            charts.ranks(rows),
            charts.stages(rows),
        ]
    parts += ["<h2>Arms</h2>", _arms(manifest["arms"])]
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>treeflash bench</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def _table(rows: Sequence[ArmSummary]) -> str:
    heads = (
        "arm",
        "block efficiency",
        "tokens/s",
        "speedup (95 %)",
        "prefill",
        "peak memory",
        "same as plain / near-tie / mismatch",
    )
    best = max(row.speedup for row in rows)
    lines = ["<table><tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for row in rows:
        memory = "unknown" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f} MB"
        wrong = row.audit.get("mismatch", 0)
        same = f"{row.audit.get('identical', 0)} / {row.audit.get('near-tie', 0)} / "
        cells = (
            html.escape(row.arm),
            f"{row.block_efficiency:.2f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f} ({row.speedup_low:.2f} to {row.speedup_high:.2f})",
            f"{1000 * row.prefill_seconds:.0f} ms",
            memory,
            same + (f"<span class=bad>{wrong}</span>" if wrong else "0"),
        )
        kind = " class=best" if row.speedup == best else ""
        lines.append(f"<tr{kind}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _arms(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = ["<table class=text><tr><th>arm</th><th>parts</th></tr>"]
    for name, parts in arms.items():
        said = "; ".join(_part(kind, options) for kind, options in parts.items())
        lines.append(f"<tr><td>{html.escape(name)}</td><td>{said or 'the target alone'}</td></tr>")
    return "\n".join([*lines, "</table>"])


def _part(kind: str, options: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in options.items() if key != "use" and value is not None)
    return html.escape(f"{kind} {options['use']}" + (f" ({rest})" if rest else ""))
