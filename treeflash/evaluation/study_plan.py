"""What a study does: a TOML file of answers, trainings, arms and measurements."""

import re
import tomllib
from collections.abc import Collection, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Self, TypeVar

import attrs

from treeflash.errors import InputError, RecipeError, TreeflashError, UnknownNameError, bullet_list, nearest
from treeflash.evaluation.arms import PLAIN
from treeflash.evaluation.prompt_sets import same_names, set_name
from treeflash.evaluation.study_tables import AnswersPlan, ArmPlan, BenchPlan, EvalPlan, TrainingPlan
from treeflash.names import wrong_names
from treeflash.plugins import KINDS, Registry
from treeflash.recipe import DEFAULTS, Recipe
from treeflash.recipe_tables import merge, parse_overrides, sort_tables, used_class
from treeflash.structuring import structure
from treeflash.text_files import read_text
from treeflash.training.training_recipe import TrainingRecipe

T = TypeVar("T")
_PACKAGE = re.compile(r"[A-Za-z0-9][\w.-]*")


@attrs.frozen
class StudyPlan:
    """A checked study.

    Attributes:
        path: The file.
        title: Of the report.
        target: Tables laid over every recipe's `[target]`.
        answers: `[answers]`; None without trainings.
        trained: Trainings by name, in order.
        arms: Arms by name, in order.
        benches: Measurements side by side by name, in order.
        evals: Measurements along answers by name, in order.
    """

    path: Path
    title: str
    target: Mapping[str, Any]
    answers: AnswersPlan | None
    trained: Mapping[str, TrainingPlan]
    arms: Mapping[str, ArmPlan]
    benches: Mapping[str, BenchPlan]
    evals: Mapping[str, EvalPlan]

    @classmethod
    def load(cls, name: str | Path, registry: Registry) -> Self:
        """Reads a study and checks it, without touching a model.

        Args:
            name: A study's name, or the path of a TOML file.
            registry: What is installed.

        Returns:
            The study.

        Raises:
            UnknownNameError: When there is no such study.
            RecipeError: Listing every fault.
        """
        named = isinstance(name, str) and not name.endswith(".toml")
        path = registry.study(str(name)) if named else Path(name)
        try:
            written = tomllib.loads(read_text(path))
        except InputError as error:
            raise RecipeError(str(error)) from None
        except (ValueError, RecursionError) as error:
            raise RecipeError(f"{path}: not valid TOML ({error})") from None
        faults: list[str] = []
        title = written.pop("title", path.stem)
        if not isinstance(title, str):
            faults.append(f"title: expected a string, found {title!r}")
        packages = written.pop("packages", [])
        if not isinstance(packages, list) or not all(map(_names_package, packages)):
            raise RecipeError(f"{path}: packages: expected a list of names, found {packages!r}")
        absent = [name for name in packages if not _installed(name)]
        if absent:
            # Alone: every name that these packages bring would be a fault of its own.
            raise RecipeError(f"{path}: packages: expected {', '.join(absent)} to be installed, found none")
        tables = sort_tables(written, ("target", "answers", "trained", "arms", "bench", "eval"), faults)
        made = cls(
            path=path,
            title=str(title),
            target=tables.get("target", {}),
            answers=_one(tables, "answers", AnswersPlan, faults),
            trained=_named(tables, "trained", TrainingPlan, faults),
            arms=_named(tables, "arms", ArmPlan, faults),
            benches=_named(tables, "bench", BenchPlan, faults),
            evals=_named(tables, "eval", EvalPlan, faults),
        )
        if not {"bench", "eval"} & tables.keys():
            faults.append("expected a table [bench.NAME] or [eval.NAME], found neither")
        faults += made._misfits(registry)
        if faults:
            raise RecipeError(bullet_list(str(path), faults))
        return made

    def only(self, names: Collection[str]) -> Self:
        """Leaves out what some measurements do not need.

        Args:
            names: `bench.NAME` and `eval.NAME` of those to keep.

        Returns:
            The study with these, their arms, and the trainings and answers that those need.

        Raises:
            InputError: For a name of none.
        """
        kept: dict[str, dict[str, Any]] = {}
        known = [f"{kind}.{name}" for kind, of in self._measurements().items() for name in of]
        for name in names:
            if name not in known:
                raise InputError(f"{self.path}: no measurement is called {name!r}{nearest(name, known)}")
        for kind, of in self._measurements().items():
            kept[kind] = {name: plan for name, plan in of.items() if f"{kind}.{name}" in names}
        plans: list[BenchPlan | EvalPlan] = [plan for of in kept.values() for plan in of.values()]
        wanted = {name for plan in plans for name in (self.arms if plan.arms is None else plan.arms)}
        arms = {name: arm for name, arm in self.arms.items() if name in wanted}
        needed = {arm.trained for arm in arms.values()}
        for name in reversed(list(self.trained)):
            if name in needed:
                needed.add(self.trained[name].start)
        trained = {name: training for name, training in self.trained.items() if name in needed}
        answers = self.answers if trained or kept["eval"] else None
        if answers is not None and not trained:
            along = [plan.answers or answers.prompts for plan in kept["eval"].values()]
            asked = [place for place in answers.prompts if any(place in places for places in along)]
            answers = attrs.evolve(answers, prompts=asked)
        return attrs.evolve(
            self, answers=answers, trained=trained, arms=arms, benches=kept["bench"], evals=kept["eval"]
        )

    def _wrong_names(self) -> list[str]:
        """Names that no file can have: what a study makes lies under them."""
        states = {plan.states: None for plan in self.trained.values() if plan.states is not None}
        asked = () if self.answers is None else self.answers.prompts
        places = {
            "trained": self.trained,
            "bench": self.benches,
            "eval": self.evals,
            "trained.NAME.states": states,
            "answers.prompts": dict.fromkeys(map(set_name, asked)),
        }
        return [f"{where}: {fault}" for where, names in places.items() for fault in wrong_names(names)]

    def _measurements(self) -> dict[str, Mapping[str, BenchPlan] | Mapping[str, EvalPlan]]:
        return {"bench": self.benches, "eval": self.evals}

    def _misfits(self, registry: Registry) -> list[str]:
        """Names that lead nowhere, and parts that are missing."""
        faults = self._wrong_names()
        if self.answers is None and (self.trained or self.evals):
            faults.append("[answers]: expected a table, because drafters learn from answers; found none")
        if not self.arms:
            faults.append("[arms]: expected something to measure, found nothing")
        recipes: dict[str, Any] = {"answers": self.answers} if self.answers is not None else {}
        recipes |= {f"trained.{name}": plan for name, plan in self.trained.items()}
        recipes |= {f"arms.{name}": plan for name, plan in self.arms.items()}
        for where, plan in recipes.items():
            faults += _wrong_recipe(where, plan, self.target, registry)
        before: list[str] = []
        for name, training in self.trained.items():
            if training.start is not None and training.start not in before:
                hint = nearest(training.start, before)
                faults.append(f"trained.{name}.start: no training before it is {training.start!r}{hint}")
            before.append(name)
        if PLAIN in self.arms:
            faults.append(f"arms.{PLAIN}: expected another name, because plain decoding has it")
        for name, arm in self.arms.items():
            if arm.trained is not None and arm.trained in self.trained:
                faults += _wrong_overrides(f"arms.{name}", arm, self.trained[arm.trained], registry)
            if (arm.recipe is None) == (arm.trained is None):
                faults.append(
                    f"arms.{name}: expected recipe or trained, found {'both' if arm.recipe else 'neither'}"
                )
            elif arm.trained is not None and arm.trained not in self.trained:
                hint = nearest(arm.trained, self.trained)
                faults.append(f"arms.{name}.trained: no training is called {arm.trained!r}{hint}")
        measured = {
            f"{kind}.{name}": plan for kind, of in self._measurements().items() for name, plan in of.items()
        }
        places = {f"bench.{name}.prompts": plan.prompts for name, plan in self.benches.items()}
        if self.answers is not None:
            places["answers.prompts"] = self.answers.prompts
        for where, named in places.items():
            fault = same_names(named)
            faults += [] if fault is None else [f"{where}: {fault}"]
        for where, wanted in measured.items():
            for name in wanted.arms or ():
                if name not in self.arms:
                    faults.append(f"{where}.arms: no arm is called {name!r}{nearest(name, self.arms)}")
        known = self.answers.prompts if self.answers is not None else []
        for where, plan in self.evals.items():
            for name in plan.answers or ():
                if name not in known:
                    hint = nearest(name, known)
                    faults.append(f"eval.{where}.answers: no file of answers.prompts is {name!r}{hint}")
        return faults


def _names_package(name: Any) -> bool:
    return isinstance(name, str) and _PACKAGE.fullmatch(name) is not None


def _installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _one(tables: Mapping[str, Any], table: str, plan: type[T], faults: list[str]) -> T | None:
    return structure(tables[table], plan, table, faults) if table in tables else None


def _named(tables: Mapping[str, Any], table: str, plan: type[T], faults: list[str]) -> dict[str, T]:
    found: dict[str, T] = {}
    if table in tables and not tables[table]:
        faults.append(f"[{table}]: expected a table [{table}.NAME], found nothing in it")
    for name, values in tables.get(table, {}).items():
        where = f"{table}.{name}"
        if not isinstance(values, Mapping):
            faults.append(f"{where}: expected a table, found {values!r}")
            continue
        made = structure(values, plan, where, faults)
        if made is not None:
            found[name] = made
    return found


def _wrong_recipe(where: str, plan: Any, target: Mapping[str, Any], registry: Registry) -> list[str]:
    """What is wrong with a recipe and what is laid over it."""
    try:
        laid_over = parse_overrides(getattr(plan, "set", []))
    except TreeflashError as error:
        return [f"{where}.set: {error}"]
    if plan.recipe is None:
        return []
    kind = TrainingRecipe if isinstance(plan, TrainingPlan) else Recipe
    try:
        kind.load(plan.recipe, registry, merge({"target": dict(target)}, laid_over))
    except UnknownNameError as error:
        return [f"{where}.recipe: {error}"]
    except RecipeError as error:
        return [f"{where}: {error}"]
    return []


def _wrong_overrides(where: str, arm: ArmPlan, plan: TrainingPlan, registry: Registry) -> list[str]:
    """What is wrong with what is laid over the recipe that a training will leave."""
    try:
        laid_over = parse_overrides(arm.set)
        left = TrainingRecipe.load(plan.recipe, registry, parse_overrides(plan.set)).decoding_tables()
    except TreeflashError:
        return []  # said of the training, or of `set`, already
    faults: list[str] = []
    tables = merge(merge(DEFAULTS, left), sort_tables(laid_over, ("target", *KINDS), faults))
    for table, keys in laid_over.items():
        found: list[str] = []
        if table in KINDS and tables[table].get("use") != "none":
            component = used_class(tables, table, table, registry, found)
            rest = {key: value for key, value in tables[table].items() if key != "use"}
            if component is not None:
                structure(rest, component.options_class(), table, found)
        # What the training itself will say is not there yet.
        faults += [fault for fault in found if any(fault.startswith(f"{table}.{key}:") for key in keys)]
    return [f"{where}.set: {fault}" for fault in faults]
