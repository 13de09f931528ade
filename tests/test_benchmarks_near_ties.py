"""The benchmark that judges parted answers, on the toy target."""

import json
import runpy
from pathlib import Path

import pytest

from treeflash.engine import Decoder
from treeflash.engine.audit import recorded
from treeflash.errors import InputError
from treeflash.evaluation.bench import _sum, said_by
from treeflash.evaluation.study import Study
from treeflash.evaluation.study_plan import StudyPlan
from treeflash.plugins import Registry
from treeflash.recipe import load
from treeflash.sampling import Draws

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
    del lines[0]["sha256"]
    # In the second turn, so that the first is part of what is read.
    (run,) = (run for run in lines[0]["runs"] if (run["arm"], run["turn"]) == ("tree", 1))
    right = run["token_ids"][2]
    run["token_ids"][2] = right + 1
    lines[0]["sha256"] = _sum(lines[0])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = judge(*measured)["toy"]
    # The right token is the one with the best score.
    assert found.below == 0
    # Read behind the first turn and its answer, and drawn at that place: as decoding had it.
    target = load("tiny-plain", target={"device": "cpu"}).target
    (first,) = (run for run in lines[0]["runs"] if (run["arm"], run["turn"]) == ("plain", 0))
    said = said_by(target.text, first["token_ids"], first["stop_reason"])
    ids = target.text.encode_chat("Ana has 3 pens.", said, "And Ben?")
    again = recorded(Decoder(target), ids, max_new_tokens=12, temperature=1.0, seed=0, sequence=0)
    scores = Draws(1.0, 0, (0,)).scores(again.logits[2], len(ids) + 1)
    assert found.apart == pytest.approx(float(scores[right] - scores[right + 1]), rel=1e-3)


def test_other_prompts_are_refused(measured):
    (measured[3] / "toy.jsonl").write_text('{"prompt": "Eve?"}\n{"prompt": "Dee has 5 pens."}\n')
    with pytest.raises(InputError, match=r"measured on other prompts than .*, toy 0 for one"):
        runpy.run_path(str(BENCHMARK))["judge"](*measured)
