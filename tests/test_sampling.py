"""Draws are a function of (seed, sequence, position), and follow the target's distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.sampling import Draws

LENGTHS = torch.tensor([10])


def choose(draws, logits, depths, length=10):
    depths = torch.tensor([depths])
    return draws.choose(logits, torch.tensor([length]), depths, int(depths.max()))[0].tolist()


@given(seed=st.integers(0, 2**40), length=st.integers(1, 50), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_same_seed_and_position_same_draw(seed, length, temperature):
    logits = torch.randn(1, 1, 30, generator=torch.Generator().manual_seed(seed))
    # Position length + depth + 1, however it is reached.
    alone = choose(Draws(temperature, seed), logits, [0], length=length + 3)
    among = choose(Draws(temperature, seed), logits.expand(1, 5, -1), [0, 1, 3, 3, 2], length=length)
    assert among[2] == among[3] == alone[0]


def test_seeds_sequences_and_positions_differ():
    logits = torch.zeros(1, 1, 1000)
    draws = {
        (seed, sequence, length): choose(Draws(1.0, seed, (sequence,)), logits, [0], length)[0]
        for seed in range(4)
        for sequence in range(4)
        for length in range(4)
    }
    assert len(set(draws.values())) > 55


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_follow_the_distribution(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    draws, count = Draws(temperature, seed=1), 4000
    found = [choose(draws, logits[None, None], [0], length)[0] for length in range(count)]
    frequencies = torch.bincount(torch.tensor(found), minlength=5) / count
    expected = (logits / temperature).softmax(0)
    # Four standard deviations of each frequency.
    assert (frequencies - expected).abs().le(4 * (expected * (1 - expected) / count).sqrt() + 1e-9).all()


def test_noise_is_drawn_once_and_forgotten_once_passed():
    draws = Draws(1.0)
    logits = torch.zeros(1, 3, 8)
    choose(draws, logits, [0, 1, 2], length=10)
    assert sorted(position for _, position in draws._noise) == [11, 12, 13]
    choose(draws, logits, [0, 1, 2], length=12)
    assert sorted(position for _, position in draws._noise) == [13, 14, 15]


def test_greedy_draws_nothing():
    draws = Draws()
    assert choose(draws, torch.tensor([[[0.0, 2.0, 1.0]]]), [0]) == [1]
    assert not draws._noise


def test_rows_of_a_batch_have_their_own_sequence():
    logits = torch.zeros(2, 1, 500)
    depths, lengths = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([10, 20])
    both = Draws(1.0, 3, (0, 1)).choose(logits, lengths, depths, 0)[:, 0].tolist()
    alone = [
        choose(Draws(1.0, 3, (sequence,)), logits[:1], [0], length)[0]
        for sequence, length in ((0, 10), (1, 20))
    ]
    assert both == alone
