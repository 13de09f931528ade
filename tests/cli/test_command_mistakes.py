"""A user's mistake: one message on standard error, exit status 2, nothing on standard output."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import treeflash
from treeflash.cli import commands, main

PROMPT = "Ana has 7 apples."


@pytest.fixture
def run(monkeypatch, capfd):
    """Exit status and both outputs of a command line."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["treeflash", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capfd.readouterr()
        return stop.value.code, out, err

    return run


MISTAKES = {
    "unknown recipe": (["tiny-treeflsh", PROMPT], ["'tiny-treeflsh'", "did you mean 'tiny-treeflash'"]),
    "missing file": (["nowhere.toml", PROMPT], ["no recipe file nowhere.toml"]),
    "unknown key": (
        ["tiny-treeflash", PROMPT, "-o", "selector.budgt=3"],
        ["tiny-treeflash.toml", "selector.budgt: unknown key", "did you mean 'budget'"],
    ),
    "wrong type": (
        ["tiny-treeflash", PROMPT, "-o", "selector.budget=many"],
        ["selector.budget: expected an integer, found 'many'"],
    ),
    "unknown table": (["tiny-treeflash", PROMPT, "-o", "selectr.budget=3"], ["[selectr]", "'selector'"]),
    "malformed override": (["tiny-treeflash", PROMPT, "-o", "budget=3"], ["expected table.key=value"]),
    "empty prompt": (["tiny-treeflash", ""], ["prompt is empty"]),
    "empty raw prompt": (["tiny-treeflash", "", "--raw"], ["prompt is empty"]),
    "bad dtype": (
        ["tiny-treeflash", PROMPT, "-o", "target.dtype=int8"],
        ["dtype", "float32", "found 'int8'"],
    ),
    "bad device": (["tiny-treeflash", PROMPT, "-o", "target.device=abacus"], ["device", "'abacus'"]),
    "missing checkpoint": (
        ["tiny-treeflash", PROMPT, "-o", "drafter.checkpoint=nowhere"],
        ["drafter.checkpoint: expected", "found 'nowhere'"],
    ),
    "wrong refiner": (
        ["tiny-treeflash", PROMPT, "-o", "refiner.use=linear"],
        ["expected 'linear', found 'swiglu'"],
    ),
    "temperature not a number": (["tiny-plain", PROMPT, "--temperature", "nan"], ["temperature", "nan"]),
    "temperature infinite": (["tiny-plain", PROMPT, "--temperature", "inf"], ["temperature", "inf"]),
    "prompt too long": (["tiny-plain", "Ana has. " * 150], ["1024 positions"]),
}
USAGE = {
    "negative temperature": ["tiny-plain", PROMPT, "--temperature", "-1"],
    "no new tokens": ["tiny-plain", PROMPT, "--max-new-tokens", "0"],
    "seed no integer": ["tiny-plain", PROMPT, "--seed", "x"],
    "negative seed": ["tiny-plain", PROMPT, "--seed", "-1"],
    "dtype no choice": ["tiny-plain", PROMPT, "--dtype", "int8"],
    "unknown option": ["tiny-plain", PROMPT, "--budget", "3"],
}


@pytest.mark.parametrize("mode", [[], ["--json"]])
@pytest.mark.parametrize("case", MISTAKES)
def test_mistake(case, mode, run):
    arguments, parts = MISTAKES[case]
    status, out, err = run("generate", *arguments, *mode)
    assert (status, out) == (2, "")
    assert err.startswith("treeflash: ")
    assert err.endswith("\n")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("case", USAGE)
def test_usage(case, run):
    status, out, err = run("generate", *USAGE[case])
    assert (status, out) == (2, "")
    assert "Error: " in err
    assert "Traceback" not in err


def test_every_fault_is_in_the_one_message(run):
    _, _, err = run("generate", "tiny-treeflash", PROMPT, "-o", "selector.budgt=3", "-o", "target.dtype=16")
    assert err.count("treeflash: ") == 1
    assert "selector.budgt" in err
    assert "target.dtype" in err


def test_success_is_status_0(run):
    status, out, err = run("generate", "tiny-plain", PROMPT, "--max-new-tokens", "2", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["new_tokens"] == 2


@pytest.mark.parametrize("arguments", [["--version"], ["-h"], ["--help"], ["generate", "--help"]])
def test_asking_is_no_mistake(arguments, run):
    status, out, err = run(*arguments)
    assert (status, err) == (0, "")
    if arguments == ["--version"]:
        assert treeflash.__version__ in out


def test_a_seed_too_large_is_a_mistake(run):
    status, _, err = run("generate", "tiny-plain", PROMPT, "--temperature", "1", "--seed", str(2**64))
    assert status == 2
    assert "seed" in err


def test_a_dtype_that_cannot_be_computed_in_is_a_mistake(run):
    status, _, err = run("generate", "tiny-plain", PROMPT, "--dtype", "float8_e4m3fn")
    assert status == 2
    assert "dtype" in err


def command(*arguments):
    """Runs the installed console script."""
    script = shutil.which("treeflash", path=Path(sys.executable).parent)
    assert script is not None
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


def test_the_console_script_generates():
    done = command("generate", "tiny-treeflash", PROMPT, "--max-new-tokens", "12", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["new_tokens"] == 12


def test_the_console_script_refuses():
    done = command("generate", "tiny-treeflash", PROMPT, "-o", "selector.budgt=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("treeflash: ")
    assert "did you mean 'budget'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["-h"]])
def test_help_loads_nothing_that_takes_its_time(words):
    code = (
        "import sys\n"
        "from treeflash.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "assert not {'torch', 'transformers', 'pluggy'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("regenerate" in done.stdout) == (words != ["--version"])


def test_every_command_is_there_by_its_name():
    context = click.Context(commands)
    for name in commands.list_commands(context):
        assert commands.get_command(context, name).name == name
    assert commands.get_command(context, "brew") is None
