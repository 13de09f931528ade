"""What the tests share: settings, and the definition of a continuation's probability, applied slowly."""

import os

import pytest
import torch
from hypothesis import settings

# Tiny models gain nothing from threads, and no test asserts a time.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start
settings.register_profile("suite", deadline=None, max_examples=25, print_blob=True)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def slow():
    """Tokens with their probabilities behind a context of a text, recounted from the token list."""

    def slow(text: list[int], context: list[int], longest: int) -> dict[int, float]:
        mixed: dict[int, float] = {}
        # From the shortest context up: each mixes its own shares with what the one below says.
        for size in range(1, min(longest, len(context)) + 1):
            tail = context[-size:]
            followed = [text[at + size] for at in range(len(text) - size) if text[at : at + size] == tail]
            if not followed:
                break
            doubt = 2 * len(set(followed))
            total = len(followed) + doubt
            mixed = {
                token: followed.count(token) / total + doubt / total * mixed.get(token, 0.0)
                for token in {*followed, *mixed}
            }
        return mixed

    return slow
