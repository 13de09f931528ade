"""Consoles that lack characters, full devices, closed pipes: no traceback, and what output there can be."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from treeflash.cli import main
from treeflash.target.text import TextStream

GENERATE = ["generate", "tiny-treeflash", "Ana has 7 apples.", "--max-new-tokens", "9"]
# Every command that prints without hours of work before.
PRINTING = {
    "generate": GENERATE,
    "trees": [*GENERATE, "--show-tree"],
    "json": [*GENERATE, "--json"],
    "components": ["components", "selector"],
    "list": ["recipes", "list"],
    "show": ["recipes", "show", "tiny-plain"],
    "recipes check": ["recipes", "check", "tiny-plain"],
    "check": ["check", "tiny-plain"],
    "script": ["completion", "bash"],
    "cache": ["cache", "list"],
    "help": ["--help"],
    "version": ["--version"],
    "help of a command": ["train", "--help"],
}
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")


def printed(words, stream, monkeypatch):
    """Exit status of a command line whose standard output is a stream."""
    monkeypatch.setattr(sys, "argv", ["treeflash", *words])
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.fixture
def console(monkeypatch):
    """Runs a command on a console of an encoding; gives what the console shows."""

    def console(encoding, *words):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding=encoding)
        assert not printed(words, stream, monkeypatch)
        stream.flush()
        return raw.getvalue().decode(encoding)

    return console


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_trees_are_drawn_in_ascii_where_the_console_has_no_lines(encoding, console):
    drawn, narrow = (console(kind, *GENERATE, "--show-tree") for kind in ("utf-8", encoding))
    assert "└─ " in drawn
    assert drawn.translate(str.maketrans("│├└─", "|+`-")) == narrow


def test_a_console_that_has_lines_is_given_lines(console):
    assert "└─ " in console("cp437", *GENERATE, "--show-tree")


def test_an_answer_that_the_console_lacks_is_shown_by_numbers(console, monkeypatch):
    monkeypatch.setattr(TextStream, "close", lambda stream: "日本")
    assert console("cp1252", *GENERATE).endswith("\\u65e5\\u672c\n")
    assert console("utf-8", *GENERATE).endswith("日本\n")


@needs_full
@pytest.mark.parametrize("name", PRINTING)
def test_a_full_device_is_one_line(name, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        status = printed(PRINTING[name], full, monkeypatch)
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed
    err = capsys.readouterr().err
    assert status == 2
    assert err.splitlines()[-1] == "treeflash: the output cannot be written: No space left on device"
    assert "Traceback" not in err


@pytest.mark.parametrize("name", PRINTING)
def test_a_closed_pipe_ends_a_command_without_a_word(name, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        status = printed(PRINTING[name], pipe, monkeypatch)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)
    assert status == 1
    assert "Traceback" not in capsys.readouterr().err


@needs_full
@pytest.mark.parametrize("output", ["/dev/full", "pipe"])
def test_the_program_ends_without_a_traceback(output):
    # What Python does at the end of a process, others cannot see.
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") if output == "pipe" else open(output, "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "treeflash", "recipes", "list"],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    told = "" if output == "pipe" else "treeflash: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1 if output == "pipe" else 2, told)
