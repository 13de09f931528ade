"""Tables of an evaluation along answers to several prompt files, as docs/results.md has them.

    python benchmarks/eval_tables.py study/eval/distributions

The folder is one that a study leaves, with a folder for each file in it. Distances and coverages are pooled
over the files, draft by draft; tokens a step are not, but their mean is shown.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the rows of the tables, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    found = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/eval.json"))}
    if not found:
        parser.exit(2, f"{folder}: expected folders with an eval.json, found none\n")
    print(", ".join(f"{name}: {results['texts']} texts" for name, results in found.items()))
    by_depth(found)
    steps(found)
    budgets(found)
    calibration(found)
    simulated_and_real(found)


def by_depth(found: dict[str, Results]) -> None:
    """Distances and coverages, pooled by drafts."""
    curves: dict[str, Callable[[Results], Results | None]] = {}
    for arm, name in ((arm, name) for arm in arms(found) for name in ("backbone", "refined")):
        curves[f"{arm}: {name}"] = lambda results, a=arm, n=name: results["arms"][a]["depths"].get(n)
    curves["true marginal"] = lambda results: results.get("true marginal")
    shown: list[list[Results]] = []
    for name, curve in curves.items():
        parts = [part for results in found.values() if (part := curve(results)) is not None]
        # Arms may share a backbone.
        if parts in shown or not any(part["drafts"] for part in parts):
            continue
        shown.append(parts)
        row(f"{name}: distance by depth", pooled(parts, [part["tvd"] for part in parts]))
        if "sampling_error" in parts[0]:
            row(f"{name}: sampling error", pooled(parts, [part["sampling_error"] for part in parts]))
        for most in parts[0]["coverage"]:
            values = [part["coverage"][most] for part in parts]
            row(f"{name}: among the {most} likeliest", pooled(parts, values))


def pooled(parts: Sequence[Results], values: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Means by depth over all drafts."""
    means: list[float | None] = []
    for depth in range(len(values[0])):
        known = [
            (part["drafts"][depth], of[depth])
            for part, of in zip(parts, values, strict=True)
            if of[depth] is not None
        ]
        drafts = sum(count for count, _ in known)
        means.append(sum(count * value for count, value in known) / drafts if drafts else None)
    return means


def steps(found: dict[str, Results]) -> None:
    """Tokens a step of every arm, file by file, and their mean."""
    print("\ntokens a step, and the mean")
    for arm in arms(found):
        values = [results["arms"][arm]["block_efficiency"] for results in found.values()]
        row(arm, [*values, sum(values) / len(values)])


def budgets(found: dict[str, Results]) -> None:
    """Tokens a step by budget."""
    for name, results in found.items():
        for arm, measured in results["arms"].items():
            if measured["by_budget"]:
                sizes = ", ".join(measured["by_budget"])
                row(f"{name}, {arm}, with {sizes}", list(measured["by_budget"].values()))


def calibration(found: dict[str, Results]) -> None:
    """Draft tokens accepted in a step: by the weights of the trees, and in fact."""
    print("\naccepted: expected, found")
    for name, results in found.items():
        for arm, measured in results["arms"].items():
            known = measured["calibration"]
            row(f"{name}, {arm}", [known["expected_accepted"], known["accepted"]])


def simulated_and_real(found: dict[str, Results]) -> None:
    """Tokens a step where texts were decoded for real, and simulated alone."""
    for name, results in found.items():
        for arm, measured in results["arms"].items():
            if "real" in measured:
                real = measured["real"]
                row(
                    f"{name}, {arm}: real, simulated; {real['same_texts']} of {real['texts']} texts the same",
                    [real["block_efficiency"], real["simulated"]],
                )


def arms(found: dict[str, Results]) -> list[str]:
    """Names, in their order."""
    return list(dict.fromkeys(arm for results in found.values() for arm in results["arms"]))


def row(name: str, values: Sequence[float | None]) -> None:
    """Prints a line of a table."""
    print(f"| {name} | " + " | ".join("" if value is None else f"{value:.2f}" for value in values) + " |")


if __name__ == "__main__":
    main()
