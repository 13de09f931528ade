"""Writes the reference of recipes and hooks from the code itself.

A line `% generated: NAME` in a page stands for what a function of this module returns. The tests read pages
through `expand` too, so nothing here needs Sphinx but `setup`.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from treeflash import hookspecs
from treeflash.describing import option_rows, summary
from treeflash.plugins import Registry
from treeflash.recipe import TargetOptions
from treeflash.training.settings import DataSettings, LossSettings, OptimizerSettings, TrainSettings

_MARK = re.compile(r"^% generated: (?P<name>[\w-]+)$", re.MULTILINE)
_BUILT_IN = "treeflash"


def expand(text: str) -> str:
    """Puts what is generated into a page.

    Args:
        text: The page's Markdown.

    Returns:
        The same, each mark replaced.

    Raises:
        KeyError: For a mark that nothing is generated for.
    """
    return _MARK.sub(lambda mark: GENERATED[mark["name"]](), text)


def hooks() -> dict[str, Any]:
    """The hook specifications by name, in the order of their module."""
    return {name: value for name, value in vars(hookspecs).items() if hasattr(value, "treeflash_spec")}


def _components(kind: str) -> Iterator[tuple[str, Any]]:
    for name, found in sorted(Registry.load().components[kind].items()):
        if found.origin == _BUILT_IN:
            yield name, found.value


def _table(options: type[Any]) -> str:
    """A row for each key, or a sentence when there is none."""
    rows = option_rows(options)
    if not rows:
        return "No keys beside `use`.\n"
    lines = ["| Key | Type | Default | Meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        default = {"required": "required", "": "not set"}.get(row.default, f"`{row.default}`")
        text = row.text.replace("|", r"\|")
        lines.append(f"| `{row.name}` | {row.kind} | {default} | {text} |")
    return "\n".join(lines) + "\n"


def _kind(kind: str) -> str:
    return "\n".join(
        f'### `use = "{name}"`\n\n{summary(value)}\n\n{_table(value.options_class())}'
        for name, value in _components(kind)
    )


def _trainables() -> str:
    return "\n".join(
        f'### `[drafter]`, `use = "{name}"`\n\n{summary(value)}\n\n{_table(value.Options)}'
        for name, value in _components("trainable")
    )


def _taught_refiners() -> str:
    """Training options of the refiners that have any; those with the same table share it."""
    tables: dict[str, list[str]] = {}
    for name, value in _components("refiner"):
        if hasattr(value, "TrainingOptions"):
            tables.setdefault(_table(value.TrainingOptions), []).append(f"`{name}`")
    return "\n".join(f"{', '.join(names)}:\n\n{table}" for table, names in tables.items())


def _losses() -> str:
    names = [f"- `{name}`: {summary(value)}" for name, value in _components("loss")]
    return "\n".join([*names, "", "Beside `use` and the loss's own keys:", "", _table(LossSettings)])


def _hook(name: str, specification: Callable[..., Any]) -> str:
    text = inspect.getdoc(specification) or ""
    adds, _, returns = text.partition("Returns:")
    kind = inspect.signature(specification).return_annotation
    spelled = re.sub(r"(?:\w+\.)+(\w+)", r"\1", inspect.formatannotation(kind))
    returned = " ".join(returns.split())
    return f"### `{name}`\n\n{adds.strip()}\n\nReturns `{spelled}`: {returned}\n"


GENERATED: dict[str, Callable[[], str]] = {
    "target": lambda: _table(TargetOptions),
    **{
        kind: lambda kind=kind: _kind(kind)
        for kind in ("drafter", "builder", "refiner", "selector", "verifier")
    },
    "trainable": _trainables,
    "taught-refiners": _taught_refiners,
    "loss": _losses,
    "train": lambda: _table(TrainSettings),
    "data": lambda: _table(DataSettings),
    "optimizer": lambda: _table(OptimizerSettings),
    "hooks": lambda: "\n".join(_hook(name, specification) for name, specification in hooks().items()),
}


def setup(app: Any) -> dict[str, bool]:
    """Has Sphinx expand each page as it reads it."""

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = expand(source[0])

    def outdated(app: Any, env: Any, *changes: Any) -> list[str]:
        """What is generated changes with the code, which Sphinx does not watch."""
        return [name for name in ("recipes", "hooks") if name in env.found_docs]

    app.connect("source-read", read)
    app.connect("env-get-outdated", outdated)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
