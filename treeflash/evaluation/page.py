"""The skeleton of a report: one page, nothing to be loaded from elsewhere."""

import html
from collections.abc import Sequence

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2330 }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d9dde5 }
p.facts { color: #5a6475; margin-top: .2rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #e6e9ef } th { font-weight: 600 }
th:first-child, td:first-child { text-align: left }
td { white-space: nowrap } 
table.text td, table.text th { text-align: left; white-space: normal }
svg { max-width: 100%; height: auto } .bad { color: #a3262a; font-weight: 600 }
"""


def document(title: str, facts: str, parts: Sequence[str]) -> str:
    """Makes a page.

    Args:
        title: Its heading, plain text.
        facts: What stands under it, plain text.
        parts: HTML, one below the other.

    Returns:
        HTML.
    """
    body = "\n".join([f"<h1>{html.escape(title)}</h1><p class=facts>{html.escape(facts)}</p>", *parts])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, text: bool = False) -> str:
    """Makes a table.

    Args:
        heads: Of its columns, plain text.
        rows: Its cells, plain text.
        text: Whether cells hold words, not figures.

    Returns:
        HTML.
    """
    lines = [f"<table{' class=text' if text else ''}>", _row("th", heads)]
    return "\n".join([*lines, *(_row("td", cells) for cells in rows), "</table>"])


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"
