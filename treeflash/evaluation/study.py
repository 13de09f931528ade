"""A study from its plan to one report: answers, trainings, measurements, each gone on with if it is there."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import attrs

from treeflash.errors import InputError, blamed_on
from treeflash.evaluation import eval_report, report
from treeflash.evaluation.arms import Arm, ArmText, measured, open_arms, refuse_lossy, weight_places
from treeflash.evaluation.bench import MANIFEST as BENCH
from treeflash.evaluation.bench import Bench, BenchSettings
from treeflash.evaluation.evaluate import RESULTS, EvalSettings, evaluate, read_results, write_results
from treeflash.evaluation.page import document, table
from treeflash.evaluation.prompt_sets import KNOWN, PromptSet, open_set
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.evaluation.study_tables import AnswersPlan, BenchPlan, EvalPlan, TrainingPlan
from treeflash.evaluation.summary import summarise
from treeflash.evaluation.texts import answers_digest
from treeflash.files import write_atomically
from treeflash.json_files import read_json
from treeflash.names import wrong_name
from treeflash.plugins import Registry
from treeflash.prompts import read_prompts
from treeflash.recipe import Recipe
from treeflash.recipe_tables import merge, parse_overrides
from treeflash.target import HuggingFaceTarget
from treeflash.training import session
from treeflash.training.folders import begin, read_manifest
from treeflash.training.locks import held
from treeflash.training.regeneration import RegenerationSettings, regenerate
from treeflash.training.run_record import refuse_adjusted
from treeflash.training.shipping import RECORD
from treeflash.training.training_recipe import TrainingRecipe

REPORT = "report.html"
MANIFEST = "measured.json"


@attrs.define(eq=False)
class Study:
    """A study that runs.

    Attributes:
        plan: What it does.
        registry: What is installed.
        inputs: Folder of the prompt files.
        out: Folder of everything it makes.
        say: Called with a sentence as each part begins.
        on_progress: Called with what is counted, how many are done and how many there are.
        report: Name of its page.
    """

    plan: StudyPlan
    registry: Registry
    inputs: Path
    out: Path
    say: Callable[[str], None] = lambda sentence: None
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
    report: str = REPORT

    def run(self) -> Path:
        """Makes what is missing, measures, and writes the report.

        Returns:
            The report.

        Raises:
            TreeflashError: When a part of it cannot be done; what was done before is kept.
        """
        # First: a file that is not there is to be missed before hours of training.
        sets = {name: self.sets(bench) for name, bench in self.plan.benches.items()}
        with held(self.out):
            return self._run(sets)

    def _run(self, sets: Mapping[str, list[PromptSet]]) -> Path:
        plan, parts = self.plan, list[str]()
        folders = [] if plan.answers is None else self._answers(plan.answers)
        records = {name: self._train(name, training, folders) for name, training in plan.trained.items()}
        if records:
            parts += ["<h2>Trainings</h2>", _trainings(records)]
        target, arms = self._arms()
        for wanted in plan.evals.values():  # before hours of measuring
            refuse_lossy(_chosen(arms, wanted.arms))
        for name, bench in plan.benches.items():
            parts += self._bench(name, bench, sets[name], target, arms)
        for name, wanted in plan.evals.items():
            for folder in folders if wanted.answers is None else map(self._answered, wanted.answers):
                parts += self._eval(name, wanted, target, arms, folder)
        write_atomically(self.out / self.report, document(plan.title, str(plan.path.name), parts))
        return self.out / self.report

    def _answers(self, plan: AnswersPlan) -> list[Path]:
        """The target's answers to each file of prompts."""
        checked = Recipe.load(plan.recipe, self.registry, {"target": self.plan.target})
        folders, target = [], None
        # All files first: one that is not there is to be missed before others are answered.
        prompts = {name: read_prompts(self.inputs / name, plan.limit) for name in plan.prompts}
        for name, read in prompts.items():
            folder = self._answered(name)
            folders.append(folder)
            self.say(f"answers to {len(read)} prompts of {name}")
            with blamed_on(checked.name):
                target = checked.load_target(self.registry) if target is None else target
            if not isinstance(target, HuggingFaceTarget):
                raise InputError(f"expected a Hugging Face model to study, found {type(target).__name__}")
            settings = RegenerationSettings(
                max_new_tokens=plan.max_new_tokens, temperature=plan.temperature, heldout=plan.heldout
            )
            regenerate(
                target,
                checked.target.model,
                read,
                folder,
                settings,
                lambda progress: self.on_progress("answers", progress.rows, progress.total_rows),
            )
        return folders

    def _answered(self, prompts: str) -> Path:
        return self.out / "answers" / Path(prompts).stem

    def _train(self, name: str, plan: TrainingPlan, folders: list[Path]) -> dict[str, Any]:
        """Trains a drafter, to the end of what an earlier run left; returns its record."""
        tables = merge({"target": dict(self.plan.target)}, parse_overrides(plan.set))
        if plan.states is not None:
            tables = merge(tables, {"data": {"states_folder": str(self.out / "states" / plan.states)}})
        if plan.start is not None:
            tables = merge(tables, {"drafter": {"checkpoint": str(self._drafter(plan.start))}})
        recipe = TrainingRecipe.load(plan.recipe, self.registry, tables)
        out = self.out / "trained" / name
        # What is measured already was measured with this drafter: trained on, it would be another.
        refuse_adjusted(out, recipe.tables)
        self.say(f"training {name}")
        listener = session.Listener(
            say=self.say,
            on_states=lambda done, total: self.on_progress("states", done, total),
            on_progress=lambda progress: self.on_progress("training", progress.step, progress.steps),
        )
        session.train(recipe, self.registry, folders, out, listener)
        return read_json(self._drafter(name) / RECORD, InputError)

    def _drafter(self, name: str) -> Path:
        return (self.out / "trained" / name / "drafter").resolve()

    def _arms(self) -> tuple[HuggingFaceTarget, list[Arm]]:
        asked = []
        for name, plan in self.plan.arms.items():
            trained = plan.trained
            recipe = str(self._drafter(trained) / "recipe.toml") if trained is not None else str(plan.recipe)
            asked.append(ArmText(name, recipe, parse_overrides(plan.set)))
        return open_arms(
            asked,
            self.registry,
            {"target": self.plan.target},
            progress=self.on_progress,
            by_clock=bool(self.plan.benches),
        )

    def sets(self, plan: BenchPlan) -> list[PromptSet]:
        """Reads the prompt sets of a measurement.

        Args:
            plan: The measurement.

        Returns:
            The sets, in its order.

        Raises:
            InputError: When one cannot be read.
        """
        return [open_set(self._placed(place), limit=plan.limit, draw=plan.draw) for place in plan.prompts]

    def _bench(
        self,
        name: str,
        plan: BenchPlan,
        sets: list[PromptSet],
        target: HuggingFaceTarget,
        arms: list[Arm],
    ) -> list[str]:
        self.say(f"bench {name}")
        folder = self.out / "bench" / name
        lines = Bench(
            target,
            _chosen(arms, plan.arms),
            sets,
            BenchSettings(plan.max_new_tokens, plan.temperature),
            folder,
            lambda done, total: self.on_progress("answers", done, total),
        ).run()
        manifest = read_manifest(folder, BENCH, "a folder of a bench")
        summaries = summarise(lines)
        provenance = report.Provenance(
            target=next(arm.recipe.target.model for arm in arms if arm.recipe is not None),
            prompts={prompts.name: prompts.source for prompts in sets},
        )
        report.write_report(folder, summaries, manifest, provenance)
        head = f"<h1>Side by side: {escape(name)}</h1><p class=facts>{escape(report.facts(manifest))}</p>"
        origin = f"<p class=facts>{escape(provenance.sentence())}</p>"
        return [head, origin, *report.sections(summaries, manifest)]

    def _eval(
        self, name: str, plan: EvalPlan, target: HuggingFaceTarget, arms: list[Arm], answers: Path
    ) -> list[str]:
        folder = self.out / "eval" / name / answers.name
        path = folder / RESULTS
        settings = EvalSettings(
            limit=plan.limit,
            anchors=plan.anchors,
            paths=plan.paths,
            budgets=tuple(plan.budgets),
            real=plan.real,
        )
        self.say(f"along answers to {answers.name}: {name}")
        chosen = _chosen(arms, plan.arms)
        manifest = {
            "settings": attrs.asdict(settings),
            "answers": answers_digest(answers),
            **measured(target, chosen),
        }
        with held(folder):
            begin(folder, MANIFEST, manifest, weight_places(chosen))
            if not path.is_file():
                progress = partial(self.on_progress, "answers")
                made = evaluate(target, chosen, answers, settings, lambda done: progress(done, done))
                write_results(folder, made)
        results = read_results(folder)
        title = f"{escape(name)}, along answers to {escape(answers.name)}"
        head = f"<h1>{title}</h1><p class=facts>{escape(eval_report.facts(results))}</p>"
        return [head, *eval_report.sections(results)]

    def _placed(self, place: str) -> str:
        """A prompt set, its file in the folder of prompt files."""
        name, equals, file = place.partition("=")
        if equals:
            return f"{name}={self.inputs / file}"
        return place if place in KNOWN else str(self.inputs / place)


def page_name(measurements: Sequence[str]) -> str:
    """Name of the page of some measurements.

    Args:
        measurements: `bench.NAME` and `eval.NAME` of each, one or more.

    Returns:
        All of them in it, or, when that is too long for a file, a hash of them.
    """
    name = f"report-{'-'.join(measurements)}.html"
    if wrong_name(name) is None:
        return name
    told = hashlib.sha256("\0".join(measurements).encode()).hexdigest()[:16]
    return f"report-{len(measurements)}-measurements-{told}.html"


def _chosen(arms: list[Arm], names: list[str] | None) -> list[Arm]:
    """Plain decoding and the arms that are wanted."""
    return arms if names is None else [arms[0], *(arm for arm in arms[1:] if arm.name in names)]


def _trainings(records: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for name, record in records.items():
        heldout = record["heldout"]
        shown = ", ".join(f"{part} {found['block_efficiency']:.2f}" for part, found in heldout.items())
        rows.append(
            (
                name,
                f"{record['trained_parameters'] / 1e6:.2f} million",
                str(record["steps"]),
                str(record["positions"]),
                f"{record['seconds'] / 60:.1f} min",
                shown,
            )
        )
    heads = ("training", "weights trained", "steps", "positions", "time", "tokens a step held out (chain)")
    return table(heads, rows)
