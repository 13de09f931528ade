"""What training is tested on: short answers of the tiny target, and recipes of a few steps."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.recipe_tables import merge
from treeflash.training import session
from treeflash.training.answers import AnswerRow, AnswerStore
from treeflash.training.regeneration import RegenerationSettings, regenerate
from treeflash.training.session import Listener
from treeflash.training.training_recipe import TrainingRecipe

NAMES = ["Ana", "Ben", "Cho", "Dee", "Fay", "Gus", "Hal", "Ina", "Joe", "Kim"]
PROMPTS = [Prompt((f"{name} has {count} coins. {name}",)) for name in NAMES for count in (3, 5, 8, 12)]

# Laid over "tiny-train": a run of a second.
SMALL = {
    "target": {"device": "cpu"},
    "drafter": {"block_size": 4, "layers": 1, "intermediate_size": 16, "anchors": 4},
    "data": {"batch_size": 4, "states": "compute", "heldout_texts": 2},
    "train": {"steps": 4, "evaluate_every": 1000, "save_every": 1000},
}


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.load()


@pytest.fixture(scope="session")
def cpu_target(tiny_targets):
    return tiny_targets["cpu"]


@pytest.fixture(scope="session")
def data(cpu_target, tmp_path_factory) -> Path:
    """A data directory of 40 answers, a fifth of them held out."""
    folder = tmp_path_factory.mktemp("answers") / "data"
    settings = RegenerationSettings(max_new_tokens=24, heldout=0.2)
    return regenerate(cpu_target, "tiny", PROMPTS, folder, settings).folder


@pytest.fixture(scope="session")
def small(registry) -> Callable[..., TrainingRecipe]:
    """Makes a training recipe of tables laid over the small one."""

    def small(**tables) -> TrainingRecipe:
        return TrainingRecipe.load("tiny-train", registry, merge(SMALL, tables))

    return small


@pytest.fixture(scope="session")
def variant(registry, small) -> Callable[..., TrainingRecipe]:
    """Makes a training recipe of the small one, some of its tables replaced; None takes one away."""

    def variant(folder: Path, **tables) -> TrainingRecipe:
        told = {**small().tables, **tables}
        path = folder / "recipe.toml"
        path.write_text(tomli_w.dumps({key: table for key, table in told.items() if table is not None}))
        return TrainingRecipe.load(path, registry)

    return variant


@pytest.fixture(scope="session")
def run(registry, data, small) -> Callable[..., Path]:
    """Trains the small recipe, or a recipe given, and returns the run's folder."""

    def run(out: Path, recipe=None, folders=None, listener: Listener | None = None, **tables) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(session, "draw", lambda *_: None)  # it takes longer than the training
            session.train(recipe or small(**tables), registry, folders or [data], out, listener)
        return out

    return run


@pytest.fixture(scope="session")
def write_data() -> Callable[..., Path]:
    """Writes a data directory of given texts."""

    def write_data(folder: Path, digest: str, rows) -> Path:
        """Rows are the split, the prompt's ids and the answer's."""
        store = AnswerStore(folder)
        store.open({"target": digest, "rows": len(rows)})
        store.write(
            0,
            [
                AnswerRow(f"{number:016x}", 0, split, prompt, answer, "", "max_new_tokens")
                for number, (split, prompt, answer) in enumerate(rows)
            ],
        )
        return folder

    return write_data


@pytest.fixture(scope="session")
def stop_at() -> Callable[[int], Listener]:
    """Makes a listener that ends a run behind a step."""

    def stop_at(step: int) -> Listener:
        def stop(progress) -> None:
            if progress.step == step:
                raise Stopped

        return Listener(on_progress=stop)

    return stop_at


class Stopped(Exception):
    """Stands for a run that ends in the middle."""


@pytest.fixture(scope="session")
def stopped() -> type[Exception]:
    return Stopped
