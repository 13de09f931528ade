"""A run that was stopped, at whatever moment, ends as if it had not been."""

import json
import shutil

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from treeflash.errors import CheckpointError, InputError
from treeflash.training import checkpointing
from treeflash.training.session import Listener

SHORT = {"steps": 6, "save_every": 2, "evaluate_every": 3}
WAYS = {
    "plain": {"train": SHORT},
    "average": {"train": {**SHORT, "average": 0.5}},
    "passes": {"train": SHORT, "data": {"length": 64}},
    "all": {
        "train": {**SHORT, "average": 0.5, "dtype": "bfloat16"},
        "data": {"length": 64, "states": "cache"},
        "drafter": {"previous": "tree"},
    },
}


def record(out):
    """What was written of each step and measurement, but for the time it took."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def of_steps(out):
    return [line for line in record(out) if "loss" in line]


def weights(out):
    return (out / "drafter" / "model.safetensors").read_bytes()


def state(out):
    """The numbers of the last checkpoint, but for the time and what it was written into."""
    last = max(out.glob("checkpoints/step-*"))
    return {**json.loads((last / "state.json").read_text()), "seconds": None, "recorded": None}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_stopped_again_and_again(way, run, stop_at, stopped, tmp_path):
    whole = run(tmp_path / "whole", **WAYS[way])
    for step in (1, 3, 4, 5):
        with pytest.raises(stopped):
            run(tmp_path / "broken", listener=stop_at(step), **WAYS[way])
        assert not (tmp_path / "broken" / "drafter").exists()
    broken = run(tmp_path / "broken", **WAYS[way])
    assert weights(broken) == weights(whole)
    assert state(broken) == state(whole)
    assert [line["step"] for line in of_steps(broken)] == list(range(1, 7))
    assert of_steps(broken) == of_steps(whole)


def test_the_average_is_what_is_shipped(run, tmp_path):
    plain = run(tmp_path / "plain", **WAYS["plain"])
    average = run(tmp_path / "average", **WAYS["average"])
    assert of_steps(plain) == of_steps(average)
    assert weights(plain) != weights(average)


def test_several_passes_are_one_step(run, tmp_path):
    """They sum what one pass would: the same losses, however the texts are packed."""
    one, several = (of_steps(run(tmp_path / way, **WAYS[way])) for way in ("plain", "passes"))
    assert [line["positions"] for line in one] == [line["positions"] for line in several]
    assert [line["loss"] for line in one] == pytest.approx([line["loss"] for line in several], rel=1e-4)


def test_a_kill_while_a_checkpoint_is_written(run, tmp_path, monkeypatch):
    whole = run(tmp_path / "whole", **WAYS["average"])
    write, calls = checkpointing.write_tensors, []

    def write_tensors(tensors, path):
        calls.append(path)
        if len(calls) == 5:  # the second file of the second checkpoint
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        write(tensors, path)

    monkeypatch.setattr(checkpointing, "write_tensors", write_tensors)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", **WAYS["average"])
    assert [path.name for path in tmp_path.glob("broken/checkpoints/step-*")] == ["step-00000002"]
    monkeypatch.undo()
    broken = run(tmp_path / "broken", **WAYS["average"])
    assert weights(broken) == weights(whole)
    assert record(broken) == record(whole)
    assert not list(broken.glob("checkpoints/.*"))


def test_a_full_disk_keeps_the_checkpoint_before(run, tmp_path, monkeypatch):
    write, calls = checkpointing.write_tensors, []

    def write_tensors(tensors, path):
        calls.append(path)
        if len(calls) > 3:
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(checkpointing, "write_tensors", write_tensors)
    with pytest.raises(InputError, match=r"cannot be written \(.*No space left on device\)"):
        run(tmp_path, **WAYS["plain"])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_broken_checkpoint_is_named(run, tmp_path):
    whole = run(tmp_path / "run", **WAYS["plain"])
    before = weights(whole)
    shutil.rmtree(whole / "drafter")
    last = whole / "checkpoints" / "step-00000006"
    (last / "weights.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"step-00000006: cannot be read .* delete it to resume"):
        run(whole, **WAYS["plain"])
    shutil.rmtree(last)
    assert weights(run(whole, **WAYS["plain"])) == before


@pytest.fixture(scope="module")
def half(run, stop_at, stopped, tmp_path_factory):
    """A run that was stopped after its second checkpoint, and what it becomes."""
    out = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(stopped):
        run(out, listener=stop_at(4), **WAYS["average"])
    whole = run(shutil.copytree(out, out.with_name("whole")), **WAYS["average"])
    return out, weights(whole)


@pytest.mark.parametrize(
    "name", ["weights.safetensors", "average.safetensors", "optimizer.safetensors", "state.json"]
)
@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_checkpoint_that_is_not_whole_is_not_resumed(run, half, tmp_path, name, damage):
    """Without what the optimizer remembers the steps would be others, and nothing would say so."""
    begun, expected = half
    out = shutil.copytree(begun, tmp_path / "run")
    last = out / "checkpoints" / "step-00000004"
    data = (last / name).read_bytes()
    (last / name).unlink() if damage == "gone" else (last / name).write_bytes(data[:-2] + b"7\n")
    with pytest.raises(
        CheckpointError, match=rf"step-00000004: cannot be read \(.*{name}: .*; delete it to resume"
    ):
        run(out, **WAYS["average"])
    shutil.rmtree(last)
    if damage == "gone":
        assert weights(run(out, **WAYS["average"])) == expected


def test_what_is_no_checkpoint_is_left_alone(run, half, tmp_path):
    begun, expected = half
    out = shutil.copytree(begun, tmp_path / "run")
    for name in ("step-abc", "step-00000009-best", "step-7"):
        (out / "checkpoints" / name).mkdir()
    (out / "checkpoints" / ".step-00000005.1.partial").mkdir()  # of a process that was killed
    (out / ".run.json.1.partial").write_text("half")
    shutil.copytree(
        out / "checkpoints" / "step-00000002", out / "checkpoints" / "step-00000001"
    )  # and one too many
    settings = {**SHORT, "average": 0.5, "keep": 1}
    assert weights(run(out, train=settings)) == expected
    left = {path.name for path in (out / "checkpoints").iterdir()}
    assert left == {"step-abc", "step-00000009-best", "step-7", "step-00000006"}
    assert not list(out.glob(".*"))


def test_a_record_that_is_gone_or_another(run, half, tmp_path):
    begun, expected = half
    out = shutil.copytree(begun, tmp_path / "run")
    path = out / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(
        InputError, match=r"metrics\.jsonl: its first \d+ bytes are not .* delete the file to continue"
    ):
        run(out, **WAYS["average"])
    path.unlink()
    said = []
    assert weights(run(out, listener=Listener(say=said.append), **WAYS["average"])) == expected
    assert f"{path} is gone: the record begins after step 4" in said
    assert [line["step"] for line in of_steps(out)] == [5, 6]


def test_settings_on_the_way_that_are_gone_or_others(run, half, tmp_path):
    begun, _ = half
    out = shutil.copytree(begun, tmp_path / "run")
    path = out / "adjusted.json"
    path.write_text(path.read_text().replace('"from_step": 0', '"from_step": 1'))
    with pytest.raises(InputError, match=r"adjusted\.json: not what was written"):
        run(out, **WAYS["average"])
    path.unlink()
    with pytest.raises(
        InputError, match=r"adjusted\.json: expected the settings of the 4 steps that are done"
    ):
        run(out, **WAYS["average"])


def test_a_run_stopped_before_its_first_checkpoint(run, stop_at, stopped, tmp_path):
    whole = run(tmp_path / "whole")
    with pytest.raises(stopped):
        run(tmp_path / "broken", listener=stop_at(1))
    assert record(run(tmp_path / "broken")) == record(whole)


def test_event_files_of_a_run_that_was_stopped(run, stop_at, stopped, tmp_path):
    settings = {**SHORT, "tensorboard": True}
    with pytest.raises(stopped):
        run(tmp_path, train=settings, listener=stop_at(3))
    run(tmp_path, train=settings)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {event.step for event in events.Scalars("loss")} >= {1, 2, 3, 4, 5}


def test_only_the_last_checkpoints_are_kept(run, tmp_path):
    settings = {"steps": 7, "save_every": 1, "keep": 3}
    run(tmp_path, train=settings)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (5, 6, 7)]


def test_a_finished_run_trains_nothing_more(run, tmp_path):
    def content():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    run(tmp_path, **WAYS["all"])
    before = content()
    steps = []
    listener = Listener(on_progress=lambda progress: steps.append(progress.step))
    run(tmp_path, listener=listener, **WAYS["all"])
    assert not steps
    assert content() == before


def test_a_run_told_to_end_where_it_was_stopped_is_measured_there(run, stop_at, stopped, tmp_path):
    """Between two measurements: the last one is of other weights."""
    settings = {**SHORT, "steps": 6, "save_every": 2, "evaluate_every": 6}
    with pytest.raises(stopped):
        run(tmp_path, train=settings, listener=stop_at(5))
    run(tmp_path, train={**settings, "steps": 4})
    shipped = json.loads((tmp_path / "drafter" / "training.json").read_text())["heldout"]
    found = {line["step"]: line["heldout"] for line in record(tmp_path) if "heldout" in line}
    assert list(found) == [0, 4]
    assert shipped == found[4] != found[0]
    before = record(tmp_path)
    run(tmp_path, train={**settings, "steps": 4})
    assert record(tmp_path) == before


@pytest.fixture(scope="module")
def begun(run, tmp_path_factory):
    """What the plain run is begun with."""
    return (run(tmp_path_factory.mktemp("begun"), **WAYS["plain"]) / "run.json").read_text()


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"optimizer": {"clip": 2.0}}, "optimizer.clip: expected None as before, found 2.0"),
        ({"train": {"seed": 9}}, "train.seed: expected None as before, found 9"),
        ({"refiner": {"use": "linear"}}, "refiner.use: expected 'swiglu' as before, found 'linear'"),
        ({"loss": {"shortlist": 9}}, "loss.shortlist: expected None as before, found 9"),
    ],
)
def test_other_settings_are_refused(run, begun, tmp_path, tables, key):
    (tmp_path / "run.json").write_text(begun)
    with pytest.raises(InputError) as error:
        run(tmp_path, **{**tables, "train": {**SHORT, **tables.get("train", {})}})
    assert key in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_may_go_on_longer_at_another_rate(run, tmp_path):
    """What is changed on the way is written down, and what does not matter to the result is free."""
    run(tmp_path, train={**SHORT, "steps": 4})
    run(tmp_path, train={**SHORT, "steps": 6, "keep": 3, "evaluate_every": 2}, optimizer={"lr": 1e-3})
    expected = [
        {"from_step": 0, "settings": {"train.steps": 4, "optimizer.lr": 2e-3}},
        {"from_step": 4, "settings": {"train.steps": 6, "optimizer.lr": 1e-3}},
    ]
    assert json.loads((tmp_path / "adjusted.json").read_text())["history"] == expected
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert record["settings_on_the_way"] == expected
    assert record["steps"] == 6
    with pytest.raises(InputError, match=r"train\.steps: expected at least 6, which are done, found 4"):
        run(tmp_path, train={**SHORT, "steps": 4})


def test_another_number_of_processes_is_refused(run, begun, tmp_path):
    several = {**json.loads(begun), "processes": 2}
    (tmp_path / "run.json").write_text(json.dumps(several))
    with pytest.raises(InputError, match="processes: expected 2 as before, found 1"):
        run(tmp_path, **WAYS["plain"])


def test_other_data_is_refused(run, begun, data, write_data, cpu_target, tmp_path):
    other = write_data(
        tmp_path / "more", cpu_target.digest(), [("train", [2, 65], [66, 67]), ("heldout", [2, 65], [66])]
    )
    (tmp_path / "run.json").write_text(begun)
    with pytest.raises(InputError, match=r"answers: expected '[0-9a-f]{16}' as before, found '[0-9a-f]{16}'"):
        run(tmp_path, folders=[data, other], **WAYS["plain"])
