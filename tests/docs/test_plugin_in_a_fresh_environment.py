"""The plugin of the documentation, installed as a stranger would, used, and taken away again."""

import json
import os
import re
import site
import subprocess
import venv
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "plugin.md"
BLOCK = re.compile(r"^```(?:toml|python)\n# (?P<name>[\w.]+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_LINES = 27
SEPARATOR = "-" * 9
USED = f"""
import pytest
from treeflash.cli import commands

commands(["components", "drafter"], standalone_mode=False)
print("{SEPARATOR}")
words = ["generate", "{{recipe}}", "Ana has 7 apples.", "--max-new-tokens", "60", "--audit", "--json"]
commands(words, standalone_mode=False)
print("{SEPARATOR}", flush=True)
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", "{{contracts}}"]))
"""


@pytest.fixture(scope="module")
def files():
    found = {match["name"]: match["text"] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))}
    assert "pyproject.toml" in found
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A new environment that sees the installed packages, so that none is downloaded."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)  # without pip: the borrowed one serves
    (mine,) = folder.glob("lib/python*/site-packages")
    borrowed = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in borrowed]
    (mine / "borrowed.pth").write_text("\n".join(lines) + "\n")
    return folder / "bin" / "python"


def modules(files):
    return {name: text for name, text in files.items() if name.endswith(".py")}


def test_it_is_short(files):
    plugins = {name: text for name, text in modules(files).items() if not name.startswith("test_")}
    assert len(plugins) == 1
    lines = [line for line in next(iter(plugins.values())).splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES


@pytest.mark.slow
def test_it_comes_and_goes_without_a_trace(files, python, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def run(*arguments, status=0):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        done = subprocess.run(
            [python, "-m", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    name = re.search(r'^name = "(.+)"', files["pyproject.toml"], re.MULTILINE)[1]
    (recipe,) = (file for file, text in files.items() if "[drafter]" in text or "extends" in text)
    run("pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation", ".")
    (contracts,) = (file for file in files if file.startswith("test_"))
    # One process for all three: importing torch takes longer than any of them.
    (tmp_path / "used.py").write_text(USED.format(recipe=recipe, contracts=contracts))
    listed, generated, tested = run("used").split(SEPARATOR)
    assert f"[{name} " in listed
    report = json.loads(generated)
    assert report["audit"]["identical"]
    assert report["block_efficiency"] > 1
    assert re.search(r"\d+ passed", tested)
    run("pip", "uninstall", "-q", "-y", name)
    # What is known is listed, and it is not there any more.
    message = run("treeflash", "generate", recipe, "Ana has 7 apples.", status=2)
    known = re.search(r"no drafter is called 'recall'.* \(known: (.*)\)", message)[1].split(", ")
    assert {"dflash", "draft-model", "none"} <= set(known)
    assert "Traceback" not in message
