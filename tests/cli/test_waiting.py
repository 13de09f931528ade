"""What the error stream shows before the first result."""

import io

import pytest
from rich.console import Console

from treeflash.cli import waiting as module
from treeflash.cli.waiting import waiting


def test_off_a_terminal_each_task_is_told_once(capsys):
    with waiting("loading") as tell:
        for done in range(3):
            tell("timing passes", done, 3)
        tell("something else", 0, 1)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "treeflash: timing passes\ntreeflash: something else\n")


@pytest.fixture
def screen(monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(module, "Console", lambda **settings: console)
    return screen


def test_on_a_terminal_a_line_moves(screen):
    with waiting("loading the target") as tell:
        tell("timing passes, once per machine", 31, 112)
    shown = screen.getvalue()
    assert "loading the target" in shown
    assert "timing passes, once per machine" in shown
    assert "31/112" in shown
