"""Writes the reference of recipes, hooks and the API into the pages, from the code itself.

    python docs/reference.py

What stands between `<!-- generated: NAME -->` and `<!-- end -->` is what a function of this module returns;
between `<!-- generated: api NAMES -->` and `<!-- end -->` it is what docstrings say of them. It is kept
in the pages, so that they can be read as they are; a test fails when it is not what the code says.
"""

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from treeflash import hookspecs
from treeflash.describing import option_rows, summary
from treeflash.plugins import Registry
from treeflash.recipe import TargetOptions
from treeflash.training.settings import DataSettings, LossSettings, OptimizerSettings, TrainSettings

PAGES = [Path(__file__).parent / name for name in ("recipes.md", "hooks.md", "api.md")]
_PART = re.compile(
    r"^<!-- generated: (?P<name>[\w-]+)(?P<rest>[^\n]*) -->$.*?^<!-- end -->$", re.DOTALL | re.MULTILINE
)
_BUILT_IN = "treeflash"


def _sibling(name: str) -> Any:
    """A module of this folder, which is not on Python's path."""
    path = Path(__file__).with_name(f"{name}.py")
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None, path
    assert specification.loader is not None, path
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


described = _sibling("api_reference").described


def expand(text: str) -> str:
    """Brings what is generated up to date.

    Args:
        text: A page's Markdown.

    Returns:
        The same, each part written anew.

    Raises:
        KeyError: For a part that nothing is generated for.
    """

    def part(match: re.Match[str]) -> str:
        name, rest = match["name"], match["rest"]
        text = described(rest) if name == "api" else GENERATED[name]()
        return f"<!-- generated: {name}{rest} -->\n\n{text.strip()}\n\n<!-- end -->"

    return _PART.sub(part, text)


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
    # Quoted where the class it names takes torch to import.
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    spelled = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text)
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


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(expand(page.read_text(encoding="utf-8")), encoding="utf-8")
