"""A tree read in several passes, each behind the one before, is the tree read in one."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeflash.errors import InputError
from treeflash.tree import TokenTree

from .target_helpers import BROAD, BROAD_PROMPT, READINGS, assert_close, prompts, row, shared_target, trees


def read_in_parts(target, state, tree, parts):
    """Logits of all nodes, read in passes that end before each of `parts` and at the end."""
    ends = sorted({*(part for part in parts if 0 < part < tree.size), tree.size})
    return torch.cat(
        [
            target.verify(state, tree.first(end), first=begin).logits
            for begin, end in zip([0, *ends], ends, strict=False)
        ],
        dim=1,
    )


# The device does not change between examples.
@settings(derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@given(prompt=prompts, shape=trees(), parts=st.sets(st.integers(1, 8), max_size=3))
def test_parts_make_the_whole(family, prompt, shape, parts, device):
    target = shared_target(family, torch.float64, device)
    tree = TokenTree.from_lists(*shape, device=device)
    state = target.start(1, 32, ())
    with torch.no_grad():
        target.prefill(state, row(prompt, device))
        found = read_in_parts(target, state, tree, parts)
        assert_close(found[0], target.verify(state, tree).logits[0])


@pytest.mark.parametrize("family", READINGS)
def test_what_is_accepted_of_the_parts_is_gone_on_from(family, device):
    target = shared_target(family, torch.float64, device)
    tree = TokenTree.from_lists(*BROAD, device=device)
    path, following = [0, 2, 4, 6], TokenTree.from_lists([30, 31], [-1, 0], device=device)
    texts = []
    with torch.no_grad():
        for parts in ([], [1, 3, 7]):
            state = target.start(1, 32, (0,))
            target.prefill(state, row(BROAD_PROMPT, device))
            read_in_parts(target, state, tree, parts)
            target.commit(state, [path])
            # The next pass begins behind the committed rows again.
            texts.append(target.verify(state, following))
    assert_close(texts[1].logits[0], texts[0].logits[0], family)
    assert_close(texts[1].taps[0], texts[0].taps[0], family)


def test_room_is_that_behind_the_rows_already_there(device):
    target = shared_target("llama", torch.float32, device)
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 1], device=device)
    state = target.start(1, 6, ())
    with torch.no_grad():
        target.prefill(state, row([1, 2, 3], device))
        target.verify(state, tree.first(2))
        with pytest.raises(InputError, match="expected at most 1 more, found 2"):
            target.verify(state, tree, first=2)
        assert target.verify(state, tree.first(3), first=2).logits.shape == (1, 1, 40)
