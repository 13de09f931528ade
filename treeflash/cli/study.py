"""`treeflash study`: answers, trainings and measurements, from one file to one report."""

from pathlib import Path

import click

from treeflash.cli.options import complete_study, progress_bar, resumable
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.extras import require_packages
from treeflash.plugins import Registry


@click.command()
@click.argument("study", shell_complete=complete_study)
@click.option(
    "--prompts",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the prompt files that the study names.",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for everything it makes.")
@click.option(
    "--only",
    multiple=True,
    metavar="bench.NAME|eval.NAME",
    help="A measurement to make, with what it needs and no other, on a page of its own; may be repeated.",
)
def study(study: str, prompts: Path, out: Path, only: tuple[str, ...]) -> None:
    """Run STUDY, the name of a study or the path of one.

    It lets the target answer prompts, trains drafters on the answers, and measures arms side by side and
    along the answers held out. Whatever is there already is gone on with; OUT/report.html has everything.
    """
    require_packages("a study", "accelerate", "matplotlib")
    registry = Registry.load()
    plan = StudyPlan.load(study, registry)
    if only:
        plan = plan.only(only)
    # What takes seconds to import comes after all that can be refused without it.
    from treeflash.evaluation.study import REPORT, Study, page_name

    with resumable(), progress_bar() as bar:
        task = bar.add_task("study", total=None, figures="")

        def say(sentence: str) -> None:
            bar.console.print(sentence, soft_wrap=True)

        def on_progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        # A report of everything that is there already is not to be lost to one of a part.
        report = page_name(only) if only else REPORT
        page = Study(plan, registry, prompts, out, say, on_progress, report).run()
    click.echo(f"report: {page}")
