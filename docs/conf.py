"""How the documentation is built: `sphinx-build -W --keep-going -b html docs docs/_build/html`."""

from typing import Any

import treeflash

project = "treeflash"
author = "the treeflash authors"
copyright = "2026, the treeflash authors"
version = release = treeflash.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"treeflash {version}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

# Docstrings have code in single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_use_ivar = True
napoleon_numpy_docstring = False


def _whole_first_line(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Puts "Tau: emitted tokens" together again, which napoleon reads as a type and a meaning."""
    types = [line for line in lines if line.startswith(":type: ")]
    if what == "property" and types:
        lines.remove(types[0])
        lines[0] = f"{types[0].removeprefix(':type: ')}: {lines[0]}"


def _plain_defaults(
    app: Any, what: str, name: str, value: Any, options: Any, signature: Any, returns: Any
) -> Any:
    """Writes the defaults that attrs makes anew for each object as dots."""
    return (signature and signature.replace("NOTHING", "..."), returns)


def setup(app: Any) -> None:
    """Connects the two."""
    app.connect("autodoc-process-docstring", _whole_first_line, priority=600)
    app.connect("autodoc-process-signature", _plain_defaults)
