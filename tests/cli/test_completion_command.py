"""`treeflash completion`: scripts for shells, and what they complete."""

import shutil
import subprocess
import sys

import pytest
from click.shell_completion import get_completion_class
from click.testing import CliRunner

from treeflash.cli import commands, main
from treeflash.plugins import Registry

SHELLS = ["bash", "zsh", "fish"]
TAKES_A_RECIPE = [
    ["generate"],
    ["check"],
    ["train"],
    ["regenerate"],
    ["recipes", "show"],
    ["recipes", "check"],
]
TINY = ["tiny-ddtree", "tiny-dflash", "tiny-plain", "tiny-train", "tiny-treeflash"]


def completions(words, incomplete="", shell="bash"):
    kind = get_completion_class(shell)
    return kind(commands, {}, "treeflash", "_TREEFLASH_COMPLETE").get_completions(words, incomplete)


def values(words, incomplete=""):
    return [item.value for item in completions(words, incomplete)]


def script(shell):
    result = CliRunner().invoke(commands, ["completion", shell], catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_registers_the_command_with_the_shell(shell):
    registers = {
        "bash": "complete -o nosort -F _treeflash_completion treeflash",
        "zsh": "#compdef treeflash",
        "fish": "complete --no-files --command treeflash",
    }
    text = script(shell)
    assert registers[shell] in text
    assert f"_TREEFLASH_COMPLETE={shell}_complete" in text


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_that_is_here_can_read_its_script(shell, tmp_path):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell} here")
    path = tmp_path / "script"
    path.write_text(script(shell))
    done = subprocess.run([program, "-n", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["powershell", "", None])
def test_another_shell_is_a_mistake(shell, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["treeflash", "completion", *([] if shell is None else [shell])])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    for name in SHELLS:
        assert name in err


@pytest.mark.parametrize("words", TAKES_A_RECIPE, ids=" ".join)
def test_names_of_recipes_are_completed(words):
    assert values(words) == sorted(Registry.load().recipes)
    found = values(words, "tiny-")
    assert set(TINY) <= set(found)
    assert all(name.startswith("tiny-") for name in found)
    # A recipe may be a file too: the shell completes those.
    assert [(item.value, item.type) for item in completions(words, "mine/ow")] == [("mine/ow", "file")]


def test_a_plugins_recipes_are_completed_too(tmp_path, monkeypatch):
    (tmp_path / "acme-tree.toml").write_text('extends = "tiny-plain"\n')
    source = f"@hookimpl\ndef treeflash_recipes():\n    return {str(tmp_path)!r}\n"
    (tmp_path / "acme_names.py").write_text(f"from treeflash.hookspecs import hookimpl\n{source}")
    info = tmp_path / "acme_names-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-names\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treeflash]\nacme = acme_names\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert values(["generate"], "acme") == ["acme-tree"]
    sys.modules.pop("acme_names")


def test_a_prompt_is_not_completed():
    assert values(["generate", "tiny-plain"], "tiny") == []


def test_commands_kinds_and_options_are_completed():
    decoding = {"cache", "check", "completion", "components", "generate", "recipes"}
    assert set(values([])) == {*decoding, "regenerate", "train", "bench", "eval", "study"}
    assert values(["recipes"]) == ["check", "list", "show"]
    assert values(["components"], "sel") == ["selector"]
    assert values(["completion"]) == SHELLS
    assert values(["generate", "tiny-plain"], "--sh") == ["--show-tree"]
    assert "--audit" in values(["generate"], "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_answers_a_shell(shell, monkeypatch, capsys):
    # As the script asks: by variables of the environment.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None, raising=False)
    monkeypatch.setattr(sys, "argv", ["treeflash"])
    monkeypatch.setenv("_TREEFLASH_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "treeflash generate tiny-pl")
    monkeypatch.setenv("COMP_CWORD", "tiny-pl" if shell == "fish" else "2")
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert [word for word in out.replace(",", "\n").splitlines() if word.startswith("tiny")] == ["tiny-plain"]


def test_the_help_says_how_to_use_a_script():
    out = CliRunner().invoke(commands, ["completion", "--help"]).stdout
    assert 'eval "$(treeflash completion bash)"' in out
