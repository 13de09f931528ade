"""Contract tests: what the engine expects of each kind of component, to subclass in a plugin's own tests.

    from treeflash.testing.contracts import DrafterContract

    class TestMine(DrafterContract):
        def make(self, target):
            return Mine()

pytest collects the tests of the base class with it.
"""

import pytest

# Before they are imported, so that their assertions show values as those of a test file do.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "builders",
            "contract",
            "drafters",
            "losses",
            "refiners",
            "selectors",
            "trainables",
            "verifiers",
        )
    )
)

from treeflash.testing.contracts.builders import BuilderContract  # noqa: E402
from treeflash.testing.contracts.drafters import DrafterContract  # noqa: E402
from treeflash.testing.contracts.losses import LossContract  # noqa: E402
from treeflash.testing.contracts.refiners import RefinerContract  # noqa: E402
from treeflash.testing.contracts.selectors import SelectorContract  # noqa: E402
from treeflash.testing.contracts.trainables import TrainableContract  # noqa: E402
from treeflash.testing.contracts.verifiers import VerifierContract  # noqa: E402

__all__ = [
    "BuilderContract",
    "DrafterContract",
    "LossContract",
    "RefinerContract",
    "SelectorContract",
    "TrainableContract",
    "VerifierContract",
]
