"""One arm of a bench over others: block efficiency and speed, by prompt set and in the mean.

    python benchmarks/ratios.py study/bench/greedy treeflash-15/ddtree-15 treeflash-63/ddtree-63

Both arms answered the same prompts, so that intervals (95 %, a bootstrap over prompts) are of their ratio
and narrower than those of each.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from treeflash.evaluation.bench import read_runs
from treeflash.evaluation.summary import Ratio, ratios


def main() -> None:
    """Prints a table for each pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("pairs", nargs="+", metavar="ARM/OTHER")
    words = parser.parse_args()
    lines = list(read_runs(words.folder))
    for pair in words.pairs:
        found = ratios(lines, *pair.split("/"))
        table = Table("", *found, title=f"{pair.replace('/', ' over ')}", title_justify="left")
        for row, name in enumerate(("block efficiency", "speed")):
            table.add_row(name, *(_shown(both[row]) for both in found.values()))
        Console().print(table)


def _shown(ratio: Ratio) -> str:
    value, low, high = (100 * (part - 1) for part in (ratio.value, ratio.low, ratio.high))
    return f"{value:+.1f} % ({low:+.1f} to {high:+.1f})"


if __name__ == "__main__":
    main()
