"""The documentation's code runs, and prints what the pages show.

Fenced blocks of a page run in its order, in a folder of their own and with one namespace:

- `python` is executed; what it prints must be the `output` block behind it. With `# name.py` for a first line
  it is a file: written, not executed. So is `toml`.
- `console` has commands (`$ ...`) and, behind each, what it prints. `treeflash` runs in this process; `pip`
  puts the folder's entry points where they are found, and takes them away again.
- Anything else (`text`, `sh`) is not executed.

Numbers that are times or come out of training match any number; `.../` at the start of a path any folder; a
line `...` any lines.
"""

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
import tomllib
import types
import warnings
from pathlib import Path

import attrs
import pytest
import torch
from click.testing import CliRunner

import treeflash
from treeflash import hookspecs
from treeflash.cli import commands
from treeflash.errors import TreeflashError
from treeflash.plugin_loading import CHOICE

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BLOCK = re.compile(r"^```(?P<kind>[\w{}-]*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# (?P<name>[\w./-]+\.(?:py|toml))\n")
EXECUTED = ("python", "toml", "console", "output")

# What a run need not repeat: speeds, and what training comes to on other machines.
FREE = [
    (re.compile(r"\d+\.\d+(?= tokens/s)"), r"\d+\.\d+"),
    (re.compile(r'(?<="tokens_per_second": )\d+\.\d+'), r"\d+\.\d+"),
    (re.compile(r"\d+\.\d+(?=s\b)"), r"\d+\.\d+"),
    (re.compile(r"^\.+ +\[100%\]\n\d+(?= passed in )", re.MULTILINE), r"\.+ +\[100%\]\n\d+"),
    (re.compile(r"(?<=held out: ).*"), None),
    (re.compile(r"(?<=states take )\S+ \w+"), r"\S+ \w+"),
    (re.compile(r"(?<![\w.])\.\.\.(?=/)"), r"\S*"),
    (re.compile(r"^\.\.\.$", re.MULTILINE), r"[\s\S]*?"),
]
NUMBER = re.compile(r"\d+\.\d+")


@attrs.frozen
class Block:
    kind: str
    text: str
    line: int

    @property
    def file(self):
        """The file that the block is, if it is one."""
        match = FILE.match(self.text)
        return match["name"] if match and self.kind in ("python", "toml") else None


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["kind"], match["text"], text.count("\n", 0, match.start()) + 1)
        for match in BLOCK.finditer(text)
    ]


def pattern(shown):
    """What the shown output may be in another run."""
    spans = {}
    for free, stands_for in FREE:
        for match in free.finditer(shown):
            numbers = NUMBER.split(match[0])
            spans[match.span()] = stands_for or r"\d+\.\d+".join(map(re.escape, numbers))
    made, place = "", 0
    for (start, end), stands_for in sorted(spans.items()):
        made += re.escape(shown[place:start]) + stands_for
        place = end
    return re.compile(made + re.escape(shown[place:]))


def trimmed(text):
    """Without the spaces at line ends and empty lines at the end that a page does not keep."""
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines())


class Shell:
    """Runs a page's commands, `pip` and `treeflash` in this process."""

    def __init__(self, folder, monkeypatch):
        self.site = folder / "site"
        self.site.mkdir()
        self.monkeypatch = monkeypatch
        monkeypatch.syspath_prepend(self.site)
        self.modules = set()

    def run(self, command):
        program, *arguments = shlex.split(command)
        return getattr(self, program)(*arguments)

    def treeflash(self, *arguments):
        result = CliRunner().invoke(commands, arguments)
        if isinstance(result.exception, TreeflashError):
            return f"{result.output}treeflash: {result.exception}"
        if not isinstance(result.exception, SystemExit | None):
            raise result.exception
        return result.output

    def pip(self, action, *arguments):
        """As `pip -q` would, for a package that is one module beside its pyproject.toml."""
        assert "-q" in arguments, "pip's own output cannot be checked"
        (name,) = [argument for argument in arguments if not argument.startswith("-")]
        if action == "uninstall":
            path = self.site / f"{name.replace('-', '_')}-1.0.dist-info"
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            self.install(Path(name))
        installed = [path.stem.removesuffix("-1.0").replace("_", "-") for path in self.site.iterdir()]
        self.monkeypatch.setenv(CHOICE, ",".join(installed))
        return ""

    def pytest(self, quiet, file):
        """Calls the tests of a file; another test runs pytest itself over them."""
        assert quiet == "-q"
        names = runpy.run_path(file)
        cases = [value for name, value in names.items() if name.startswith("Test")]
        tests = [(case, name) for case in cases for name in dir(case) if name.startswith("test_")]
        for case, name in tests:
            getattr(case(), name)()
        return f"{'.' * len(tests)}  [100%]\n{len(tests)} passed in 0.00s"

    def install(self, folder):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        entries = project["entry-points"]["treeflash"]
        info = self.site / f"{project['name'].replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        version = project["version"]
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
        )
        lines = [f"{name} = {module}" for name, module in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[treeflash]", *lines, ""]))
        self.monkeypatch.syspath_prepend(folder.resolve())
        self.modules |= set(entries.values())


def commands_of(block):
    """Each command of a console block, and the output shown behind it."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, trimmed(shown)


def execute(code, page, line, names):
    """Runs Python as the page has it, line numbers included."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\n" * line + code, str(page), "exec"), names)
    return trimmed(out.getvalue())


def run_page(page, folder, monkeypatch):
    """Runs a page's blocks in order.

    Yields:
        The place and what is run there; what the page shows; what was printed.
    """
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    monkeypatch.syspath_prepend(folder / "work")  # as in a notebook, or beside a script
    # What a contributor has installed beside is not in the pages.
    monkeypatch.setenv(CHOICE, "")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shell, names = Shell(folder, monkeypatch), {"__name__": page.stem}
    blocks = [block for block in blocks_of(page) if block.kind in EXECUTED]
    try:
        for block, behind in zip(blocks, [*blocks, None][1:], strict=True):
            where = f"{page.name}:{block.line}"
            if block.file is not None:
                path = Path(block.file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.kind == "python":
                shown = trimmed(behind.text) if behind is not None and behind.kind == "output" else ""
                yield f"{where}", shown, execute(block.text, page, block.line, names)
            elif block.kind == "console":
                for command, shown in commands_of(block):
                    yield f"{where}: {command}", shown, trimmed(shell.run(command))
    finally:
        of_the_page = [
            name
            for name, module in sys.modules.items()
            if str(getattr(module, "__file__", None)).startswith(str(folder))
        ]
        for module in {*shell.modules, *of_the_page}:
            sys.modules.pop(module, None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_shows_what_happens(page, tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for where, shown, printed in run_page(page, tmp_path, monkeypatch):
            assert pattern(shown).fullmatch(printed), f"{where}\nshows:\n{shown}\n\nprints:\n{printed}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_of_known_kinds(page):
    kinds = [block.kind for block in blocks_of(page)]
    assert set(kinds) <= {*EXECUTED, "text", "sh", "{toctree}", "{eval-rst}"}
    # Output belongs to the code before it.
    pairs = zip([None, *kinds], kinds, strict=False)
    assert all(before == "python" for before, kind in pairs if kind == "output")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        file = target.partition("#")[0]
        if file and "://" not in target:
            assert (DOCS / file).is_file(), target


@pytest.fixture(scope="module")
def reference():
    """The script that writes the references."""
    path = DOCS / "reference.py"
    specification = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_every_hook_is_documented_on_its_page(reference):
    page = (DOCS / "hooks.md").read_text(encoding="utf-8")
    named = [name for name in vars(hookspecs) if name.startswith("treeflash_")]
    assert named
    for name in named:
        (section,) = re.findall(rf"^### `{name}`\n\n(.*?)(?=^##|\Z)", page, re.DOTALL | re.MULTILINE)
        adds, returns = re.search(r"(.*?)\n\nReturns `[^`]+`: (.*)", section, re.DOTALL).groups()
        assert adds.startswith("Adds ")
        assert len(returns.split()) > 3


def test_every_component_and_key_is_on_the_recipe_page(reference):
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    registry = reference.Registry.load()
    for kind, found in registry.components.items():
        for name, value in found.items():
            if value.origin != "treeflash":
                continue
            assert f"`{name}`" in page or f'`use = "{name}"`' in page, (kind, name)
            options = value.value.Options if kind == "trainable" else value.value.options_class()
            for row in reference.option_rows(options):
                assert f"| `{row.name}` | {row.kind} |" in page


def test_every_key_has_a_meaning(reference):
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| `.*$", page, re.MULTILINE):
        assert not row.endswith("|  |"), row


def test_what_is_generated_is_what_the_code_says(reference):
    for page in reference.PAGES:
        text = page.read_text(encoding="utf-8")
        assert "<!-- generated: " in text
        assert reference.expand(text) == text, f"python docs/reference.py brings {page.name} up to date"


def test_an_unknown_part_is_an_error(reference):
    with pytest.raises(KeyError):
        reference.expand("<!-- generated: nonsense -->\n<!-- end -->\n")
    with pytest.raises(AttributeError, match="no_such_name"):
        reference.expand("<!-- generated: api treeflash.no_such_name -->\n<!-- end -->\n")


def test_public_names_are_on_the_api_page():
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^### `(.+)`$", page, re.MULTILINE))
    for name in treeflash.__all__:
        value = getattr(treeflash, name)
        assert {f"treeflash.{name}", f"{value.__module__}.{name}"} & described, name
    # Each with a signature, so that the page can be read where it lies.
    assert page.count("\n### `") + page.count("\n#### `") == page.count("```text\n")
    assert "eval-rst" not in page


class Documented:
    """Does something.

    In two sentences. Or three.

    Attributes:
        size: Of it,
            over two lines.
    """

    size: int = 3

    def put(self, where: "Path | None", *, times: int = 2, then=print, **others: int) -> dict[str, Path]:
        """Puts it.

        Args:
            where: To a `place`.
            times: How often: at least once.
            **others: More.

        Returns:
            What was
            put.

        Raises:
            ValueError: When it cannot.
            KeyError: Never.
        """

    def _hidden(self):
        """Is not shown."""

    @property
    def half(self) -> float:
        """A half."""


PUT = """\
#### `Documented.put`

```text
put(where: Path | None, *, times: int = 2, then = ..., **others: int) -> dict[str, Path]
```

Puts it.

**Arguments**

- `where`: To a `place`.
- `times`: How often: at least once.
- `**others`: More.

**Returns** What was put.

**Raises**

- `ValueError`: When it cannot.
- `KeyError`: Never.
"""
DOCUMENTED = """\
### `module.Documented`

```text
class Documented
```

Does something.

In two sentences. Or three.

**Attributes**

- `size`: Of it, over two lines.
"""


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        ("", [DOCUMENTED, PUT, "#### `Documented.half`\n\n```text\nhalf: float\n```\n\nA half.\n"]),
        ("!", [DOCUMENTED]),
        ("!put", [DOCUMENTED, PUT]),
    ],
)
def test_docstrings_become_markdown(members, shown, reference, monkeypatch):
    module = types.ModuleType("module")
    module.Documented = Documented
    monkeypatch.setitem(sys.modules, "module", module)
    written = reference.described(f"module.Documented{members}")
    assert re.sub(r"\n+", "\n", written) == re.sub(r"\n+", "\n", "".join(shown))


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("12.5 tokens/s", "99.0 tokens/s", True),
        ("12.5 tokens", "99.0 tokens", False),
        ("step 5, held out: a 1.25", "step 5, held out: a 2.50", True),
        ("step 5, held out: a 1.25", "step 5, held out: b 2.50", False),
        ("# .../tiny.toml", "# /usr/lib/tiny.toml", True),
        ("# .../tiny.toml", "# /usr/lib/other.toml", False),
        ("one\n...\nfour", "one\ntwo\nthree\nfour", True),
        ("one\n...\nfour", "one\ntwo\nthree\nfive", False),
    ],
)
def test_what_may_differ(shown, printed, same):
    assert bool(pattern(shown).fullmatch(printed)) is same
