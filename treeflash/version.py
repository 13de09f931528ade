"""The version, as `pyproject.toml` has it: known where the package runs from a checkout too."""

__version__ = "0.1.0"
