"""Where things are kept, and that they are whole."""

from pathlib import Path

import platformdirs
import pytest

from treeflash.errors import InputError
from treeflash.files import cache_folder, write_atomically
from treeflash.training.folders import write_folder


def test_the_cache_is_the_users_or_the_one_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TREEFLASH_CACHE", "")
    assert cache_folder() == platformdirs.user_cache_path("treeflash", appauthor=False)
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREEFLASH_CACHE", "here")
    assert cache_folder() == tmp_path / "here"
    monkeypatch.setenv("TREEFLASH_CACHE", "~nobody-here/x")
    with pytest.raises(InputError, match="TREEFLASH_CACHE: expected a folder, found '~nobody-here/x'"):
        cache_folder()


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path = tmp_path / "a"
    write_atomically(path, "before")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "folder", "x")
    with pytest.raises(InputError, match="cannot be written"):
        write_atomically(tmp_path / "none" / "a", "x")
    assert path.read_text() == "before"
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "folder"}


def test_a_folder_that_cannot_be_put_in_place_leaves_the_one_before(tmp_path, monkeypatch):
    def fill(folder):
        (folder / "a").write_text("after")

    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_text("before")
    rename = Path.rename

    def fail(path, target):
        if path.name.endswith(".partial"):
            raise OSError("the disk is gone")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="cannot be written"):
        write_folder(tmp_path / "kept", fill)
    assert (tmp_path / "kept" / "a").read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
