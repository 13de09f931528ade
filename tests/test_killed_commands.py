"""The four long commands: killed with -9 wherever they write, and started twice on one folder."""

import json
import os
import random
import signal
import sys
import traceback
import warnings

import pytest

from treeflash.cli import main
from treeflash.evaluation import charts
from treeflash.training import plots
from treeflash.training.locks import LOCK, held

TRAIN = {
    "target.device": "cpu",
    "drafter.block_size": 4,
    "drafter.layers": 1,
    "drafter.intermediate_size": 16,
    "drafter.anchors": 2,
    "data.batch_size": 2,
    "data.heldout_texts": 1,
    "train.steps": 3,
    "train.save_every": 1,
    "train.keep": 1,
    "train.average": 0.5,
}
STUDY = """
[target]
device = "cpu"
[answers]
recipe = "tiny-plain"
prompts = ["toy.jsonl"]
max_new_tokens = 6
heldout = 0.4
[trained.small]
recipe = "tiny-train"
set = ["train.steps=1", "drafter.layers=1", "drafter.anchors=2", "data.batch_size=2", "data.heldout_texts=1"]
states = "all"
[arms.small]
trained = "small"
[bench.all]
prompts = ["toy.jsonl"]
limit = 2
max_new_tokens = 4
[eval.all]
limit = 1
anchors = 0
paths = 0
budgets = [3]
"""
# Kills of each command: of so many a random share of the places where it makes something last.
KILLS = {"regenerate": 3, "train": 3, "bench": 2, "study": 2}


@pytest.fixture(scope="module", autouse=True)
def quick_pictures():
    """Drawing takes longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_svg", lambda down, across, draw: "<svg></svg>")
        patch.setattr(plots, "_draw", lambda folder, lines: (folder / "loss.png").write_bytes(b""))
        yield


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"prompt": f"{name} has {count} coins."} for name in ("Ana", "Ben", "Cho") for count in (3, 5)]
    (folder / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "study.toml").write_text(STUDY)
    return folder


@pytest.fixture(scope="module")
def words(inputs, tmp_path_factory):
    """Each command, but for its `--out`."""
    data = tmp_path_factory.mktemp("data") / "data"
    regenerate = ["regenerate", "tiny-plain", "--prompts", str(inputs / "toy.jsonl"), "--max-new-tokens", "8"]
    regenerate += ["--batch-size", "2", "--heldout", "0.4", "-o", "target.device=cpu"]
    assert here([*regenerate, "--out", str(data)]) == 0
    train = ["train", "tiny-train", "--data", str(data)]
    train += [word for key, value in TRAIN.items() for word in ("-o", f"{key}={value}")]
    bench = ["bench", "tiny-ddtree", "--prompts", str(inputs / "toy.jsonl"), "--limit", "3"]
    bench += ["--max-new-tokens", "6", "-o", "target.device=cpu"]
    study = ["study", str(inputs / "study.toml"), "--prompts", str(inputs)]
    return {"regenerate": regenerate, "train": train, "bench": bench, "study": study}


def here(words):
    """Runs a command in this process, which imports all it needs; gives its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["treeflash", *words])
        with pytest.raises(SystemExit) as stop:
            main()
    return stop.value.code or 0


def begin(words, prepare=lambda: None):
    """Starts a command in a process of its own, which has imported all that it needs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the runner of the tests has
        number = os.fork()
    if number:
        return number
    status = 70
    try:
        sys.argv = ["treeflash", *words]
        prepare()
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(words, prepare=lambda: None):
    """Runs a command to its end; gives the exit status, or the signal that ended it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(begin(words, prepare), 0)[1])


def watch_writes(patch, see):
    """Calls a function before whatever makes something last."""
    for name in ("fsync", "rename", "replace", "unlink"):
        plain = getattr(os, name)

        def watched(*words, plain=plain, **settings):
            see()
            return plain(*words, **settings)

        patch.setattr(os, name, watched)


def kill_at(place):
    seen = []

    def see():
        seen.append(None)
        if len(seen) == place:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_writes(pytest.MonkeyPatch(), see)


def left(out):
    """All that a run leaves but for times, and what depends on them."""
    found = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name, data = str(path.relative_to(out)), path.read_bytes()
        if path.suffix in (".html", ".png") or path.name in (
            "SHA256SUMS",
            "tokens.safetensors",
            "results.json",
        ):
            data = b""
        elif path.suffix in (".json", ".jsonl", ".md"):
            data = without_times(
                [json.loads(line) for line in data.decode().splitlines()]
                if path.suffix == ".jsonl"
                else json.loads(data)
                if path.suffix == ".json"
                else None
            )
        found[name] = data
    return found


TIMED = {"seconds", "prefill_seconds", "decode_seconds", "pass_seconds", "peak_bytes", "sha256", "recorded"}


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in TIMED}
    return [without_times(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("command", KILLS)
def test_killed_wherever_it_writes(command, words, tmp_path, capfd):
    """Again and again into one folder, each time a little later."""
    generator = random.Random(command)
    # One after the other at one place: its name is part of what is written.
    out, writes = tmp_path / "out", []
    with pytest.MonkeyPatch.context() as patch:
        watch_writes(patch, lambda: writes.append(None))
        assert here([*words[command], "--out", str(out)]) == 0
    whole = left(out)
    out.rename(tmp_path / "whole")
    for place in sorted(generator.sample(range(1, len(writes)), KILLS[command])):
        status = run([*words[command], "--out", str(out)], lambda place=place: kill_at(place))
        assert status in (-signal.SIGKILL, 0), (place, capfd.readouterr().err)
    assert run([*words[command], "--out", str(out)]) == 0, capfd.readouterr().err
    assert left(out) == whole
    assert not list(out.rglob(".*"))


@pytest.mark.parametrize("command", KILLS)
def test_the_second_of_two_is_refused(command, words, tmp_path, capfd):
    with held(tmp_path / "out"):
        before = (tmp_path / "out" / LOCK).read_bytes()
        assert here([*words[command], "--out", str(tmp_path / "out")]) == 2
        assert [path.name for path in (tmp_path / "out").iterdir()] == [LOCK]
        assert (tmp_path / "out" / LOCK).read_bytes() == before
    told = capfd.readouterr().err
    assert f"out is in use by process {os.getpid()} on " in told
    assert "Traceback" not in told


def test_of_several_started_at_once_one_runs(words, tmp_path, capfd):
    """Each waits with the folder in its hands until all others have ended."""
    out = tmp_path / "out"
    ends = [os.pipe() for _ in range(3)]
    everyone = list[int]()

    def wait(mine):
        write = os.write
        os.close(ends[mine][1])

        def stay(*_):
            # Ends of others are closed when those have ended.
            for number, (read, write_end) in enumerate(ends):
                if number != mine:
                    os.close(write_end)
                    os.read(read, 1)

        del write
        from treeflash.training import regeneration

        plain = regeneration.AnswerStore.open

        def held_up(store, manifest):
            stay()
            return plain(store, manifest)

        regeneration.AnswerStore.open = held_up

    for number in range(len(ends)):
        everyone.append(begin([*words["regenerate"], "--out", str(out)], lambda number=number: wait(number)))
    for _, write in ends:
        os.close(write)
    codes = [os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in everyone]
    for read, _ in ends:
        os.close(read)
    told = capfd.readouterr().err
    assert sorted(codes) == [0, 2, 2], told
    winner = everyone[codes.index(0)]
    assert told.count(f"out is in use by process {winner} on ") == 2
