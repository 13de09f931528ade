"""Contract tests: what the engine expects of each kind of component, to subclass in a plugin's own tests.

    from treeflash.testing.contracts import DrafterContract

    class TestMine(DrafterContract):
        def make(self, target):
            return Mine()

pytest collects the tests of the base class with it.
"""

from treeflash.testing.contracts.builders import BuilderContract
from treeflash.testing.contracts.drafters import DrafterContract
from treeflash.testing.contracts.losses import LossContract
from treeflash.testing.contracts.refiners import RefinerContract
from treeflash.testing.contracts.selectors import SelectorContract
from treeflash.testing.contracts.trainables import TrainableContract
from treeflash.testing.contracts.verifiers import VerifierContract

__all__ = [
    "BuilderContract",
    "DrafterContract",
    "LossContract",
    "RefinerContract",
    "SelectorContract",
    "TrainableContract",
    "VerifierContract",
]
