"""Draws, rates and averages are functions of the step, whoever computes them."""

from collections import Counter
from itertools import chain

import pytest
import torch

from treeflash.training.averaging import WeightAverage
from treeflash.training.draws import batch_of, question_generator, weights_generator
from treeflash.training.schedule import learning_rate


@pytest.mark.parametrize(("size", "count"), [(4, 10), (3, 9), (7, 3), (1, 1), (5, 4)])
def test_each_text_once_an_epoch(size, count):
    drawn = [pair for step in range(3 * count) for pair in batch_of(step, size, count, seed=1)]
    assert [epoch for epoch, _ in drawn] == sorted(epoch for epoch, _ in drawn)
    whole = Counter(drawn[: len(drawn) // count * count])
    assert set(whole.values()) == {1}
    assert set(whole) == {(epoch, text) for epoch in range(3 * size) for text in range(count)}


@pytest.mark.parametrize("processes", [2, 3, 4])
def test_batches_do_not_depend_on_who_shares_them(processes):
    small = [batch_of(step, 2, 17, seed=3) for step in range(processes * 5)]
    great = [batch_of(step, 2 * processes, 17, seed=3) for step in range(5)]
    assert list(chain(*small)) == list(chain(*great))


def test_orders_differ_by_epoch_and_seed():
    orders = [
        tuple(text for _, text in batch_of(epoch, 20, 20, seed)) for epoch in range(3) for seed in range(3)
    ]
    assert len(set(orders)) == 9
    assert orders == [
        tuple(text for _, text in batch_of(epoch, 20, 20, seed)) for epoch in range(3) for seed in range(3)
    ]


def test_generators():
    def first(generator):
        return torch.randint(1 << 60, (1,), generator=generator).item()

    keys = [(seed, epoch, text) for seed in range(3) for epoch in range(3) for text in range(3)]
    drawn = [first(question_generator(*key)) for key in keys]
    assert drawn == [first(question_generator(*key)) for key in keys]
    assert len({*drawn, *(first(weights_generator(seed)) for seed in range(3))}) == len(keys) + 3


def test_learning_rate():
    rates = [learning_rate(step, steps=100, peak=2.0, warmup=0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[10] == 2.0
    assert rates[55] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[99] < 0.001


@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_learning_rate_of_few_steps(steps, warmup):
    rates = [learning_rate(step, steps, 1.0, warmup) for step in range(steps)]
    assert max(rates) == 1.0
    assert min(rates) > 0


def test_weight_average():
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    average = WeightAverage([weight], 0.5)
    expected = 4.0
    for step, value in enumerate([8.0, 2.0, 6.0, 6.0, 6.0, 6.0, 1.0, 1.0, 1.0, 0.0]):
        weight.data.fill_(value)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert average.values[0].item() == pytest.approx(expected)
    with average.in_place():
        assert weight.item() == pytest.approx(expected)
    assert weight.item() == 0.0
    with pytest.raises(ZeroDivisionError), average.in_place():
        raise ZeroDivisionError
    assert weight.item() == 0.0
    assert average.values[0].item() == pytest.approx(expected)


def test_no_average():
    weight = torch.nn.Parameter(torch.tensor([4.0]))
    average = WeightAverage([weight], 0.0)
    average.update(0)
    with average.in_place():
        assert weight.item() == 4.0
    assert not average.values
