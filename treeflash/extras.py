"""Packages that only some commands need."""

import importlib.util

from treeflash.errors import InputError


def require_packages(purpose: str, *names: str) -> None:
    """Makes sure, before hours of work, that what it needs in the end can be imported.

    Args:
        purpose: What needs them, to begin a message with: "training".
        names: Of the packages, which pip installs by the same names.

    Raises:
        InputError: When one is missing; the message says how to install it.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"{purpose} needs {', '.join(missing)}, expected to be installed: "
            f"python -m pip install {' '.join(missing)}"
        )
