"""A measurement as one page: tables and pictures, nothing to be loaded from elsewhere."""

import datetime
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from treeflash.evaluation import charts
from treeflash.evaluation.page import document, table
from treeflash.evaluation.summary import ArmSummary, as_json
from treeflash.files import write_atomically
from treeflash.version import __version__

RESULTS, REPORT = "results.json", "report.html"

_NOTES = """
Block efficiency is tokens emitted by verification passes over those passes, pooled over all steps; the
token of the prefill and everything past a stop are not counted. Speed is those tokens over the time of
decoding, the first draft included and the prefill apart. Speedup is the ratio of total speeds. Intervals
are of 95 %, over prompts drawn anew. Budgets do not count the root. An answer is the same as plain
decoding's to the token; or parts from it where two tokens tie as nearly as the dtype rounds, a near-tie; or
is a mismatch, which is a fault. An arm marked lossy has a verifier that gives up the target's own text on
purpose: its answers are not compared, and its speed is not that of the same text. Memory is that of the
whole process, with what all arms have loaded.
"""


@attrs.frozen
class Provenance:
    """Where a report comes from: what a reader needs to make it again.

    Attributes:
        target: The target, as its recipe names it.
        prompts: File or hub name by prompt set.
        command: The command line; empty if it was made from Python.
        date: The day it was written, as `YYYY-MM-DD`.
        version: Of treeflash.
    """

    target: str
    prompts: Mapping[str, str]
    command: str = ""
    date: str = attrs.field(factory=lambda: datetime.date.today().isoformat())
    version: str = __version__

    def sentence(self) -> str:
        """All of it in one line."""
        places = "; ".join(f"{name} from {place}" for name, place in self.prompts.items())
        made = f", by: {self.command}" if self.command else ""
        return f"{self.target}; {places}. Written on {self.date} by treeflash {self.version}{made}"


def write_report(
    folder: Path,
    summaries: Mapping[str, Sequence[ArmSummary]],
    manifest: Mapping[str, Any],
    provenance: Provenance,
) -> Path:
    """Writes `results.json` and `report.html`.

    Args:
        folder: Of the measurement.
        summaries: From `summarise`.
        manifest: What was measured.
        provenance: Where it comes from.

    Returns:
        The page.

    Raises:
        InputError: When the disk does not take them.
    """
    results = {
        "measured": dict(manifest),
        "provenance": attrs.asdict(provenance),
        "results": as_json(summaries),
    }
    write_atomically(folder / RESULTS, json.dumps(results, indent=1) + "\n")
    write_atomically(folder / REPORT, page(summaries, manifest, provenance))
    return folder / REPORT


def page(
    summaries: Mapping[str, Sequence[ArmSummary]], manifest: Mapping[str, Any], provenance: Provenance
) -> str:
    """Makes the page.

    Args:
        summaries: From `summarise`.
        manifest: What was measured.
        provenance: Where it comes from.

    Returns:
        HTML.
    """
    origin = f"<p class=facts>{html.escape(provenance.sentence())}</p>"
    return document("treeflash bench", facts(manifest), [origin, *sections(summaries, manifest)])


def facts(manifest: Mapping[str, Any]) -> str:
    """How a measurement was made, in a line.

    Args:
        manifest: What was measured.
    """
    settings, machine = manifest["settings"], manifest["measured_on"]
    threads = "" if machine["threads"] is None else f", {machine['threads']} threads"
    return (
        f"{manifest['target']['dtype']} on {machine['device']}{threads}, torch {machine['torch']}, "
        f"temperature {settings['temperature']}, up to {settings['max_new_tokens']} new tokens, "
        f"seed {settings['seed']}"
    )


def sections(summaries: Mapping[str, Sequence[ArmSummary]], manifest: Mapping[str, Any]) -> list[str]:
    """What the page holds.

    Args:
        summaries: From `summarise`.
        manifest: What was measured.

    Returns:
        HTML, one below the other.
    """
    parts = [charts.efficiency_and_speed(summaries), f"<p>{_NOTES}</p>"]
    for name, rows in summaries.items():
        prompts = rows[0].prompts
        disturbed = [row.disturbance for row in rows if row.disturbance is not None]
        parts += [
            f"<h2>{html.escape(name)}</h2><p class=facts>{prompts} prompt{'s' * (prompts > 1)}</p>",
            *(f"<p class=bad>{html.escape(sentence)}</p>" for sentence in disturbed),
            _results(rows),
            charts.acceptance(rows),
            "<p>How often the target chose a child, by its rank among its siblings:</p>",
            charts.ranks(rows),
            charts.stages(rows),
        ]
    return [*parts, "<h2>Arms</h2>", _arms(manifest["arms"])]


def _results(rows: Sequence[ArmSummary]) -> str:
    heads = (
        "arm",
        "block efficiency (95 %)",
        "tokens/s",
        "speedup (95 %)",
        "prefill",
        "peak memory",
        "same as plain / near-tie / mismatch",
    )
    lines = []
    for row in rows:
        memory = "unknown" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f} MB"
        lines.append(
            (
                row.label,
                f"{row.block_efficiency:.2f} ({row.acceptance_interval})",
                f"{row.tokens_per_second:.1f}",
                f"{row.speedup:.2f} ({row.speedup_interval})",
                f"{1000 * row.prefill_seconds:.0f} ms",
                memory,
                " / ".join(row.audit_counts),
            )
        )
    return table(heads, lines)


def _arms(arms: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = []
    for name, parts in arms.items():
        said = "; ".join(_part(kind, options) for kind, options in parts.items())
        lines.append((name, said or "the target alone"))
    return table(("arm", "parts"), lines, text=True)


def _part(kind: str, options: Mapping[str, Any]) -> str:
    rest = ", ".join(f"{key} {value}" for key, value in options.items() if key != "use" and value is not None)
    return f"{kind} {options['use']}" + (f" ({rest})" if rest else "")
