"""Where things are kept, and that they are whole."""

import os
import re
import tomllib
from pathlib import Path

import platformdirs
import pytest
import torch
from safetensors.torch import save_file

import treeflash
from treeflash.checkpoints.writing import write_tensors
from treeflash.errors import InputError
from treeflash.files import cache_folder, follow_umask, write_atomically
from treeflash.json_files import located_json
from treeflash.names import wrong_name, wrong_names
from treeflash.text_files import read_text
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


def test_a_line_that_is_not_text_is_named(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbffine\nnot \xff\n")
    with pytest.raises(InputError, match=r"a\.toml: line 2 is not UTF-8 \(byte 0xff at column 5\)"):
        read_text(path)
    path.write_bytes(b"\xef\xbb\xbffine\n")
    assert read_text(path) == "fine\n"
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000])
def test_what_is_no_json(text):
    with pytest.raises(InputError, match=r"^here: not valid JSON \("):
        located_json(text, "here")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_follow_the_umask(tmp_path, umask):
    """Libraries make some private, so that nobody else could read a shared cache or drafter."""
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "a", "text")
        write_tensors({"a": torch.zeros(2)}, tmp_path / "b")
        write_folder(tmp_path / "folder", lambda into: write_tensors({"a": torch.zeros(2)}, into / "c"))
        (tmp_path / "made").mkdir()
        save_file({"a": torch.zeros(2)}, tmp_path / "made" / "d")
        follow_umask(tmp_path / "made")
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert found == dict.fromkeys("abcd", 0o666 & ~umask)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "expected a name, found none"),
        ("../x", "expected a name without '/', found '../x'"),
        ("a\\b", "expected a name without"),
        ("a:b\t", r"expected a name without '\\t' ':'"),
        ("a\nb", "expected a name without"),
        ("\0", "expected a name without"),
        ("\ud800", "expected a name without"),
        ("..", "neither begins nor ends with a dot or a space"),
        (".hidden", "neither begins nor ends with a dot or a space"),
        ("a ", "neither begins nor ends with a dot or a space"),
        ("NUL.x", "Windows reserves it"),
        ("ä" * 51, "at most 100 bytes, found 102"),
    ],
)
def test_names_of_no_file(name, fault):
    assert re.search(fault, wrong_name(name) or "") is not None


def test_names_that_some_file_systems_take_for_one():
    assert wrong_names(["a", "b", "é", "two words", "x=1,y.z"]) == []
    for one, other in (("a", "A"), ("\u00e9", "e\u0301")):
        (fault,) = wrong_names([one, "b", other])
        assert fault == f"expected names that differ in more than case, found {one!r} and {other!r}"


def test_the_version_is_the_one_that_is_installed():
    path = Path(treeflash.__file__).parent.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    assert treeflash.__version__ == project["version"]
