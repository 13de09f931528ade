"""How the documentation is built: `sphinx-build -W --keep-going -b html docs docs/_build/html`."""

import treeflash

project = "treeflash"
author = "the treeflash authors"
copyright = "2026, the treeflash authors"
version = release = treeflash.__version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"treeflash {version}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
