"""Draws are a function of (seed, sequence, position), and follow the target's distribution."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.sampling import MAX_SEED, Draws

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


@given(logits=st.integers(0, 99), position=st.integers(0, 99), temperature=st.sampled_from([0.0, 0.7, 1.0]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_is_chosen_as_many_are(dtype, logits, position, temperature):
    row = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(logits)).to(dtype)
    draws = Draws(temperature, 7, (5,))
    many = choose(draws, row, [0, 3], length=position)
    assert many == [draws.choose_one(row[0, 0], position), draws.choose_one(row[0, 1], position + 3)]


@pytest.mark.parametrize("where", ["seed", "sequence"])
def test_all_bits_of_a_word_count(where):
    """Words on both sides of 2**63 stand beside one another in a key."""
    words = [0, 1, 2**63 - 1, 2**63, 2**63 + 1, MAX_SEED - 1, MAX_SEED]
    logits = torch.zeros(10_000)
    made = [Draws(1.0, word, (3,)) if where == "seed" else Draws(1.0, 3, (word,)) for word in words]
    assert len({draws.choose_one(logits, 0) for draws in made}) == len(words)


@pytest.mark.parametrize("word", [-1, 2**64, 1.5, "1", None])
def test_what_is_no_word_is_refused(word):
    for settings in ({"seed": word}, {"sequences": (word,)}):
        with pytest.raises(ValueError, match=r"must be an integer in 0\.\.2\*\*64-1, found"):
            Draws(1.0, **settings)


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
    one_by_one = Draws(1.0, 3, (0, 1))
    assert both == [one_by_one.choose_one(logits[row, 0], int(lengths[row]), row) for row in (0, 1)]
