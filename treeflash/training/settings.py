"""What a training recipe says beside its components."""

import attrs
from attrs.validators import and_, ge, gt, in_, le, lt

from treeflash.ranges import MAX_SEED

COMPUTE, CACHE = "compute", "cache"
FLOAT32, BFLOAT16 = "float32", "bfloat16"


@attrs.frozen
class TrainSettings:
    """`[train]`: how long, and what is kept of it.

    Attributes:
        steps: Optimizer steps.
        seed: Of the first weights, the order of the texts and all draws.
        dtype: "float32", or "bfloat16" for products in it; weights and their averages stay float32.
        average: Decay of a running average of the weights, which is what is then measured and shipped;
            0 for none.
        evaluate_every: Steps between measurements on held-out texts.
        save_every: Steps between checkpoints.
        keep: Checkpoints kept, the last ones.
        tensorboard: Write event files too.
        shard: Share weights and optimizer out over processes (FSDP2), for drafters that are large.
    """

    steps: int = attrs.field(validator=ge(1))
    seed: int = attrs.field(default=0, validator=and_(ge(0), le(MAX_SEED)))
    dtype: str = attrs.field(default=FLOAT32, validator=in_((FLOAT32, BFLOAT16)))
    average: float = attrs.field(default=0.0, validator=and_(ge(0), lt(1)))
    evaluate_every: int = attrs.field(default=200, validator=ge(1))
    save_every: int = attrs.field(default=200, validator=ge(1))
    keep: int = attrs.field(default=2, validator=ge(1))
    tensorboard: bool = False
    shard: bool = False


@attrs.frozen
class DataSettings:
    """`[data]`: how texts are read.

    Attributes:
        batch_size: Texts a step, in each process.
        length: Tokens read in one pass at most: texts are packed up to it, and cut off behind it. A step is
            made of as many passes as its texts need.
        states: "cache" keeps what the target makes of the texts on disk, "compute" computes it each time.
        states_folder: Where it is kept, seen from the working directory, to be shared by runs on the same
            data; in the run's folder when not given.
        heldout_texts: Held-out texts that are measured, at most.
    """

    batch_size: int = attrs.field(default=16, validator=ge(1))
    length: int = attrs.field(default=2048, validator=ge(8))
    states: str = attrs.field(default=CACHE, validator=in_((COMPUTE, CACHE)))
    states_folder: str | None = None
    heldout_texts: int = attrs.field(default=32, validator=ge(1))


@attrs.frozen
class OptimizerSettings:
    """`[optimizer]`: AdamW under a cosine schedule.

    Attributes:
        lr: Highest learning rate.
        warmup: Share of the steps that it takes to get there.
        weight_decay: Of AdamW, on matrices alone.
        beta1: Of AdamW.
        beta2: Of AdamW.
        clip: Highest norm of a step's gradient.
    """

    lr: float = attrs.field(default=6e-4, validator=gt(0))
    warmup: float = attrs.field(default=0.04, validator=and_(ge(0), le(1)))
    weight_decay: float = attrs.field(default=0.0, validator=ge(0))
    beta1: float = attrs.field(default=0.9, validator=and_(ge(0), lt(1)))
    beta2: float = attrs.field(default=0.95, validator=and_(ge(0), lt(1)))
    clip: float = attrs.field(default=1.0, validator=gt(0))


@attrs.frozen
class LossSettings:
    """`[loss]` beside the loss's own options.

    Attributes:
        shortlist: Compare distributions over this many tokens, the most frequent of the answers; 0 for the
            whole vocabulary.
    """

    shortlist: int = attrs.field(default=0, validator=ge(0))
