"""Training from Python: what `treeflash train` does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeflash.extras import require_packages
from treeflash.plugins import Registry

if TYPE_CHECKING:
    from treeflash.training.session import Listener


def train(
    recipe: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    listener: "Listener | None" = None,
    **overrides: Mapping[str, Any],
) -> Path:
    """Trains a drafter on a target's answers, as `treeflash train` does; resumes a run that was stopped.

    Args:
        recipe: The name or path of a training recipe.
        data: One or several data directories, as `treeflash regenerate` writes them.
        out: Folder of the run.
        listener: Told how it goes: `treeflash.training.session.Listener`.
        **overrides: Tables laid over the recipe's, for instance `train={"steps": 100}`.

    Returns:
        The recipe that decodes with the trained drafter, which `treeflash.load` takes.

    Raises:
        TreeflashError: When recipe, data and target do not go together, or the run cannot go on.
    """
    require_packages("training", "accelerate", "matplotlib")
    from treeflash.training import session
    from treeflash.training.training_recipe import TrainingRecipe

    folders = [data] if isinstance(data, str | Path) else data
    registry = Registry.load()
    checked = TrainingRecipe.load(recipe, registry, overrides)
    return session.train(checked, registry, list(map(Path, folders)), Path(out), listener)
