"""The end of a run: a folder with the drafter, and with what a reader needs to know of it."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from treeflash.errors import CompositionError
from treeflash.trainable import Trainable
from treeflash.training.folders import write_folder

# An owner and a name, as the hub has them; a folder or a plugin's target is none.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
RECIPE, CARD, RECORD = "recipe.toml", "README.md", "training.json"


def ship(trainable: Trainable, folder: Path, decoding: Mapping[str, Any], record: Mapping[str, Any]) -> Path:
    """Writes the drafter.

    Args:
        trainable: What was trained.
        folder: Where it goes; one that is there is replaced.
        decoding: What the training recipe says of decoding, its target included.
        record: How it was trained, as JSON takes it: `recipe`, `data`, `heldout` and more.

    Returns:
        The recipe that decodes with it.

    Raises:
        TreeflashError: When the disk does not take it.
    """

    def fill(into: Path) -> None:
        tables = {key: dict(table) for key, table in trainable.write(into).items()}
        for key, table in decoding.items():
            tables[key] = {**tables.get(key, {}), **table}
        if "use" not in tables.get("drafter", {}):
            raise CompositionError(
                f"trainable {type(trainable).__name__}: write returned no drafter.use, the name of the "
                "drafter that decodes with what was trained"
            )
        order = [
            key
            for key in ("target", "drafter", "builder", "refiner", "selector", "verifier")
            if key in tables
        ]
        recipe = tomli_w.dumps({key: tables[key] for key in order})
        (into / RECIPE).write_text(recipe, encoding="utf-8")
        (into / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (into / CARD).write_text(_card(record, recipe), encoding="utf-8")

    write_folder(folder, fill)
    return folder / RECIPE


def _card(record: Mapping[str, Any], recipe: str) -> str:
    """A model card."""
    data, heldout = record["data"], record["heldout"]
    model = str(record["recipe"]["target"]["model"])
    lines = [
        "---",
        "library_name: treeflash",
        *([f"base_model: {model}"] if _HUB_NAME.fullmatch(model) and not Path(model).exists() else []),
        "tags:",
        "- speculative-decoding",
        f"- {record['recipe']['drafter']['use']}",
        "---",
        "",
        f"# A drafter for {record['recipe']['target']['model']}",
        "",
        "It drafts what this target writes next, for speculative decoding with treeflash. The text is the",
        "target's own whatever it drafts, and it is of no use without the target.",
        "",
        "```text",
        'treeflash generate recipe.toml "..."',
        "```",
        "",
        f"- Parameters: {record['parameters'] / 1e6:.1f} million, {record['trained_parameters'] / 1e6:.1f} "
        "of them trained",
        f"- Learned from: {data['texts']} answers of the target itself, {data['tokens']} tokens "
        f"(fingerprint `{data['fingerprint']}`), in {record['steps']} steps over {record['positions']} "
        "drafted positions",
        f"- Target: `{record['target']}`, read in {record['dtype']}",
        "",
        f"On {data['heldout_texts']} answers held out, along the target's own text:",
        "",
        *_table(heldout),
        "",
        "Tokens a step are those of a chain of likeliest tokens; top-1 is how often the likeliest token is",
        "the target's, behind the true token before it.",
        "",
        "`training.json` has the recipe and all figures. To decode with it:",
        "",
        "```toml",
        recipe.rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _table(heldout: Mapping[str, Any]) -> Sequence[str]:
    depths = len(next(iter(heldout.values()))["top1"])
    heads = ["Distribution", "tokens a step", *(f"top-1 at {depth}" for depth in range(1, depths + 1))]
    rows = [
        [name, f"{summary['block_efficiency']:.2f}", *(f"{value:.2f}" for value in summary["top1"])]
        for name, summary in heldout.items()
    ]
    return ["| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows)]
