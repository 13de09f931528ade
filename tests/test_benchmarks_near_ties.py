"""The benchmark that judges parted answers, on the toy target."""

import json
import runpy
from pathlib import Path

import pytest

from treeflash.errors import InputError
from treeflash.evaluation.study import Study
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.plugins import Registry

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "near_ties.py"
STUDY = """
[target]
device = "cpu"
[arms.tree]
recipe = "tiny-ddtree"
[bench.sampled]
prompts = ["toy.jsonl"]
max_new_tokens = 12
temperature = 1.0
"""


@pytest.fixture
def measured(tmp_path):
    rows = [{"turns": ["Ana has 3 pens.", "And Ben?"]}, {"prompt": "Dee has 5 pens."}]
    inputs, out, path = tmp_path / "inputs", tmp_path / "out", tmp_path / "mine.toml"
    inputs.mkdir()
    (inputs / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(STUDY)
    registry = Registry.load()
    plan = StudyPlan.load(path, registry)
    Study(plan, registry, inputs, out).run()
    return plan, "sampled", registry, inputs, out


def test_parted_answers_are_found_and_judged(measured):
    judge = runpy.run_path(str(BENCHMARK))["judge"]
    assert judge(*measured) == {"toy": []}
    path = measured[-1] / "bench" / "sampled" / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # In the second turn, so that the first is part of what is read.
    (run,) = (run for run in lines[0]["runs"] if (run["arm"], run["turn"]) == ("tree", 1))
    run["token_ids"][2] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = judge(*measured)["toy"]
    # The right token is the one with the best score: read and drawn at the right place.
    assert found.below == 0
    assert found.apart > 0


def test_other_prompts_are_refused(measured):
    (measured[3] / "toy.jsonl").write_text('{"prompt": "Eve?"}\n{"prompt": "Dee has 5 pens."}\n')
    with pytest.raises(InputError, match=r"measured on other prompts than .*, toy 0 for one"):
        runpy.run_path(str(BENCHMARK))["judge"](*measured)
