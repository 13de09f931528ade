"""From a training recipe's file to what it says.

The tables are `[target]`, `[drafter]`, `[refiner]`, `[loss]`, `[data]`, `[optimizer]` and `[train]`. A
builder, selector or verifier may stand beside them: they go into the recipe that decodes with the trained
drafter.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from treeflash.errors import RecipeError, bullet_list
from treeflash.plugins import Registry
from treeflash.recipe import TargetOptions
from treeflash.recipe_tables import DEFAULT_USE, Written, merge, open_tables, sort_tables, used_class
from treeflash.structuring import structure
from treeflash.training.settings import DataSettings, LossSettings, OptimizerSettings, TrainSettings

_SETTINGS = {"train": TrainSettings, "data": DataSettings, "optimizer": OptimizerSettings}
_DECODING = ("builder", "selector", "verifier")
_TABLES = ("target", "drafter", "refiner", "loss", *_SETTINGS, *_DECODING)
_DEFAULTS: dict[str, dict[str, Any]] = {"loss": {"use": DEFAULT_USE["loss"]}, "data": {}, "optimizer": {}}


@attrs.frozen
class TrainingRecipe:
    """A checked training recipe.

    Attributes:
        name: What messages call it: the file, and what was laid over it.
        tables: What it says, with what it extends and what was laid over it.
        target: What the drafter is for.
        trainable: The class that trains the drafter.
        trainable_options: An instance of its options.
        refiner: The refiner's class; None without one.
        refiner_options: An instance of what it is trained with; None without one.
        loss: The loss's class.
        loss_options: An instance of its options.
        loss_settings: What else `[loss]` says.
        train: `[train]`.
        data: `[data]`.
        optimizer: `[optimizer]`.
    """

    name: str = attrs.field(eq=False)
    tables: Mapping[str, Any]
    target: TargetOptions
    trainable: type[Any]
    trainable_options: Any
    refiner: type[Any] | None
    refiner_options: Any
    loss: type[Any]
    loss_options: Any
    loss_settings: LossSettings
    train: TrainSettings
    data: DataSettings
    optimizer: OptimizerSettings

    @classmethod
    def load(
        cls, name: str | Path, registry: Registry, overrides: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Self:
        """Reads a training recipe and checks it, without touching a model.

        Args:
            name: A recipe's name, or the path of a TOML file.
            registry: What is installed.
            overrides: Tables laid over the file's.

        Returns:
            The recipe.

        Raises:
            UnknownNameError: When there is no such recipe.
            RecipeError: Listing every fault.
        """
        written, faults = open_tables(name, registry, overrides), list[str]()
        tables, found = _outline(written, faults)
        trainable = used_class(tables, "drafter", "trainable", registry, faults)
        trainable_options = _options(tables, "drafter", getattr(trainable, "Options", None), faults)
        refiner, refiner_options = None, None
        if "refiner" in tables:
            refiner = used_class(tables, "refiner", "refiner", registry, faults)
            if trainable is not None and not trainable.trains_refiners and refiner is not None:
                faults.append("[refiner]: this drafter is trained without one")
            taught = getattr(refiner, "TrainingOptions", _NothingToTrain)
            refiner_options = _options(tables, "refiner", taught, faults)
        _check_decoding(tables, registry, faults, {} if refiner is None else {"refiner": refiner})
        loss = used_class(tables, "loss", "loss", registry, faults)
        own, common = _split(tables.get("loss", {}), LossSettings)
        loss_settings = structure(common, LossSettings, "loss", faults)
        loss_options = _options({"loss": own}, "loss", loss and loss.options_class(), faults)
        if faults or loss_settings is None or loss is None or trainable is None:
            raise RecipeError(bullet_list(written.name, faults))
        return cls(
            name=written.name,
            tables=tables,
            trainable=trainable,
            trainable_options=trainable_options,
            refiner=refiner,
            refiner_options=refiner_options,
            loss=loss,
            loss_options=loss_options,
            loss_settings=loss_settings,
            **found,
        )

    @staticmethod
    def check_outline(
        name: str | Path, registry: Registry, overrides: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Checks as much of a training recipe as needs no component, which takes seconds to import.

        Args:
            name: A recipe's name, or the path of a TOML file.
            registry: What is installed.
            overrides: Tables laid over the file's.

        Raises:
            UnknownNameError: When there is no such recipe.
            RecipeError: Listing every fault of its tables, and of those that name no component.
        """
        written, faults = open_tables(name, registry, overrides), list[str]()
        _outline(written, faults)
        if faults:
            raise RecipeError(bullet_list(written.name, faults))

    def decoding_tables(self) -> dict[str, Any]:
        """The tables that say how the trained drafter is to decode."""
        said = {key: dict(self.tables[key]) for key in ("target", *_DECODING) if key in self.tables}
        used = {key: {"use": self.tables[key]["use"]} for key in ("drafter", "refiner") if key in self.tables}
        if ":" in used["drafter"]["use"]:  # the class that trains it: what it writes names the drafter
            del used["drafter"]
        return {**said, **used}


def _outline(written: Written, faults: list[str]) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """A training recipe's tables, and the settings of those that name no component."""
    tables = sort_tables(merge(_DEFAULTS, written.tables), _TABLES, faults)
    if "train" not in written.tables:
        faults.append("[train]: expected a table with a key steps: this recipe decodes, it does not train")
        tables["train"] = {"steps": 1}
    return tables, {
        table: structure(tables.get(table, {}), settings, table, faults)
        for table, settings in {"target": TargetOptions, **_SETTINGS}.items()
    }


@attrs.frozen
class _NothingToTrain:
    """Options of a refiner that has no weights."""


def _check_decoding(
    tables: Mapping[str, Mapping[str, Any]],
    registry: Registry,
    faults: list[str],
    used: Mapping[str, type[Any]],
) -> None:
    """Finds what would be wrong with the recipe that decodes, before anything is trained for it.

    Args:
        tables: The recipe's.
        registry: What is installed.
        faults: Every fault is added here.
        used: The classes that are known already, by kind.
    """
    from treeflash.engine.decoder import misfits  # and with it torch

    for kind in _DECODING:
        if kind in tables:
            part = used_class(tables, kind, kind, registry, faults)
            _options(tables, kind, part and part.options_class(), faults)
            if kind == "builder" and part is not None:
                used = {**used, kind: part}
    # One that is trained may be registered for that alone.
    drafter = registry.components["drafter"].get(str(tables.get("drafter", {}).get("use")))
    if drafter is not None and "builder" in used:
        used = {**used, "drafter": drafter.value}
        fault = misfits(used, {kind: repr(tables[kind]["use"]) for kind in used}).get("builder")
        faults += [] if fault is None else [f"builder.use: {fault}"]


def _options(
    tables: Mapping[str, Mapping[str, Any]], table: str, options: type[Any] | None, faults: list[str]
) -> Any:
    if options is None:
        return None
    rest = {key: value for key, value in tables.get(table, {}).items() if key != "use"}
    return structure(rest, options, table, faults)


def _split(table: Mapping[str, Any], settings: type[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts a table into the keys that are not, and those that are, settings."""
    names = {field.name for field in attrs.fields(settings)}
    own = {key: value for key, value in table.items() if key not in names}
    return own, {key: value for key, value in table.items() if key in names}
