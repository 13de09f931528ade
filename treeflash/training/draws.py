"""Random draws of a training run: each a function of the seed and of what it is for.

So nothing has to be remembered to resume a run exactly, and nothing depends on how many processes share it.
"""

import numpy
import torch

_WEIGHTS, _ORDER, _QUESTIONS = range(3)


def _generator(*numbers: int) -> torch.Generator:
    (state,) = numpy.random.SeedSequence(numbers).generate_state(1, numpy.uint64)
    return torch.Generator().manual_seed(int(state) >> 1)


def weights_generator(seed: int) -> torch.Generator:
    """For the first weights."""
    return _generator(seed, _WEIGHTS)


def question_generator(seed: int, epoch: int, text: int) -> torch.Generator:
    """For what a text is asked in an epoch.

    Args:
        seed: Of the run.
        epoch: From 0.
        text: Number of the text in the corpus.

    Returns:
        A generator on the CPU.
    """
    return _generator(seed, _QUESTIONS, epoch, text)


def batch_of(step: int, size: int, count: int, seed: int) -> list[tuple[int, int]]:
    """The texts of a step: all texts in an order drawn anew each epoch, one epoch behind the other.

    Args:
        step: From 0.
        size: Texts a step.
        count: Texts there are.
        seed: Of the run.

    Returns:
        Epoch and number of each text.
    """
    drawn: dict[int, torch.Tensor] = {}
    batch = []
    for place in range(step * size, (step + 1) * size):
        epoch, index = divmod(place, count)
        if epoch not in drawn:
            drawn[epoch] = torch.randperm(count, generator=_generator(seed, _ORDER, epoch))
        batch.append((epoch, int(drawn[epoch][index])))
    return batch
