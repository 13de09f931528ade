"""`treeflash cache`: listing and clearing."""

import click
import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TREEFLASH_CACHE", str(folder))
    return folder


def fill(folder):
    for name, size in (("costs/a.json", 30), ("costs/b.json", 70), ("model/model.safetensors", 2000)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def test_what_is_kept_is_listed_with_sizes(command, folder):
    fill(folder)
    assert command("cache", "list")[:2] == (0, f"costs  100 bytes\nmodel  2.0 kB\nin {folder}\n")


def test_nothing_is_kept(command, folder):
    assert command("cache", "list")[:2] == (0, f"nothing is kept: there is no {folder} yet\n")
    assert command("cache", "clear")[:2] == (0, f"nothing is kept in {folder}\n")


def test_one_entry_is_cleared(command, folder):
    fill(folder)
    assert command("cache", "clear", "costs", "--yes")[0] == 0
    assert [path.name for path in folder.iterdir()] == ["model"]


def test_everything_is_cleared(command, folder):
    fill(folder)
    status, out, _ = command("cache", "clear", "--yes")
    assert (status, out) == (0, f"deleted costs, model (2.1 kB) from {folder}\n")
    assert list(folder.iterdir()) == []


def test_what_is_not_confirmed_stays(command, folder, monkeypatch):
    def refuse(text, abort):
        raise click.Abort

    fill(folder)
    monkeypatch.setattr("click.confirm", refuse)
    assert command("cache", "clear")[0] == 1
    assert len(list(folder.iterdir())) == 2


def test_a_name_that_is_not_kept(command, folder):
    fill(folder)
    status, _, err = command("cache", "clear", "cost", "--yes")
    assert status == 2
    assert f"{folder} keeps nothing called 'cost'; did you mean 'costs'?" in err
    assert len(list(folder.iterdir())) == 2
