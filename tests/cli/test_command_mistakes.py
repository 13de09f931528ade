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


# Of each kind, told by click, before torch is imported, and after. Many more are in tests/test_mistakes.py.
MISTAKES = {
    "unknown recipe": (["tiny-treeflsh", PROMPT], ["'tiny-treeflsh'", "did you mean 'tiny-treeflash'"]),
    "unknown key": (
        ["tiny-treeflash", PROMPT, "-o", "selector.budgt=3"],
        ["tiny-treeflash.toml", "selector.budgt: unknown key", "did you mean 'budget'"],
    ),
    "wrong refiner": (
        ["tiny-treeflash", PROMPT, "-o", "refiner.use=linear"],
        ["expected 'linear', found 'swiglu'"],
    ),
    "prompt too long": (["tiny-plain", "Ana has. " * 150], ["1024 positions"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_with_json_is_told_on_the_error_stream(case, run):
    arguments, parts = MISTAKES[case]
    status, out, err = run("generate", *arguments, "--json")
    assert (status, out) == (2, "")
    assert err.startswith("treeflash: ")
    assert err.endswith("\n")
    for part in parts:
        assert part in err


def test_every_fault_is_in_the_one_message(run):
    _, _, err = run("generate", "tiny-treeflash", PROMPT, "-o", "selector.budgt=3", "-o", "builder.childen=3")
    assert "2 faults" in err
    assert "selector.budgt" in err
    assert "builder.childen" in err


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


def command(*arguments):
    """Runs the installed console script."""
    script = shutil.which("treeflash", path=Path(sys.executable).parent)
    assert script is not None
    return subprocess.run([script, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_console_script_generates():
    done = command("generate", "tiny-treeflash", PROMPT, "--max-new-tokens", "12", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["new_tokens"] == 12


@pytest.mark.slow
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
