"""What the framework expects of a drafter and of a trainable, and that the text stays the target's own."""

from pathlib import Path

from treeflash_eagle3.drafter import Eagle3
from treeflash_eagle3.trainable import Eagle3Trainable, Eagle3TrainingOptions

from treeflash.places import locate
from treeflash.testing.contracts import DrafterContract, TrainableContract

GOLDEN = Path(__file__).parent / "golden"


class TestRandomHead(DrafterContract):
    """Seldom right."""

    def make(self, target):
        return Eagle3.from_checkpoint(GOLDEN / "tiny-eagle3", target, children=6)


class TestTrainedHead(DrafterContract):
    """Often right, down to the last level."""

    def make(self, target):
        return Eagle3.from_checkpoint(locate("treeflash_eagle3:tiny"), target)


class TestRandomHeadInDoublePrecision(TestRandomHead):
    dtype = "float64"


class TestTrainedHeadInDoublePrecision(TestTrainedHead):
    dtype = "float64"


class TestTraining(TrainableContract):
    def make(self, context):
        return Eagle3Trainable.from_options(Eagle3TrainingOptions(draft_vocab_size=96, unroll=4), context)
