"""A folder that a run writes has one writer, and what killed ones left goes."""

import json
import os
import subprocess
import sys

import pytest

from treeflash.errors import InputError
from treeflash.files import partial_path
from treeflash.training import locks
from treeflash.training.locks import LOCK, held

# Takes a folder, says so, and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from treeflash.training.locks import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_second_is_refused_and_a_killed_first_is_no_obstacle(tmp_path):
    folder = tmp_path / "out"
    words = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError) as error, held(folder):
            pass
        assert f"{folder} is in use by process {holder.pid} on " in str(error.value)
        holder.kill()
    assert json.loads((folder / LOCK).read_bytes())["pid"] == holder.pid
    with held(folder):
        assert json.loads((folder / LOCK).read_bytes())["pid"] == os.getpid()
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_folder_is_left_as_it_is(tmp_path):
    with held(tmp_path / "new" / "out"):
        assert [path.name for path in (tmp_path / "new" / "out").iterdir()] == [LOCK]
    assert not (tmp_path / "new" / "out").exists()
    with held(tmp_path / "out"):
        (tmp_path / "out" / "a").write_text("")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    (tmp_path / "empty").mkdir()
    with held(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_two_in_one_process(tmp_path):
    with held(tmp_path):
        with pytest.raises(InputError, match=f"in use by process {os.getpid()} "), held(tmp_path):
            pass
        # The first still holds it.
        with pytest.raises(InputError), held(tmp_path):
            pass
    with held(tmp_path):
        pass


def test_a_lock_that_is_removed_between_opening_and_locking_is_not_one(tmp_path, monkeypatch):
    """Its holder removes it as it ends; who had opened it before would hold what nobody else sees."""
    lock, taken = locks.lock_descriptor, []

    def late(number, *, blocking):
        taken.append(number)
        if len(taken) == 1:
            (tmp_path / LOCK).unlink()
        return lock(number, blocking=blocking)

    monkeypatch.setattr(locks, "lock_descriptor", late)
    with held(tmp_path):
        assert len(taken) == 2
        assert (tmp_path / LOCK).exists()


def test_a_holder_that_has_not_said_who_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_PAUSE", 0.0)
    with held(tmp_path):
        (tmp_path / LOCK).write_bytes(b"")
        with pytest.raises(InputError, match="in use by another process"), held(tmp_path):
            pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(number, *, blocking):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks, "lock_descriptor", none)
    with pytest.warns(RuntimeWarning, match="this file system has no locks"), held(tmp_path):
        pass


@pytest.mark.parametrize("name", ["file", "file/below", "long" * 100])
def test_what_cannot_be_a_folder(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"), held(tmp_path / name):
        pass


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    for name in ("a", "folder", "moved"):
        partial = partial_path(tmp_path / name)
        if name == "folder":
            partial.mkdir()
            (partial / "half").write_text("half")
        else:
            partial.write_text("half")
    (tmp_path / "a").write_text("whole")
    # Killed between two renames: the one before is the only one.
    (tmp_path / ".moved.before").mkdir()
    (tmp_path / ".moved.before" / "kept").write_text("")
    # And behind the second.
    (tmp_path / "again").mkdir()
    (tmp_path / ".again.before").mkdir()
    # These are the user's.
    for name in (".hidden", "x.12.partial", ".x.partial"):
        (tmp_path / name).write_text("mine")
    with held(tmp_path):
        found = sorted(path.name for path in tmp_path.iterdir() if path.name != LOCK)
    assert found == sorted(["a", "again", "moved", ".hidden", "x.12.partial", ".x.partial"])
    assert (tmp_path / "moved" / "kept").exists()
