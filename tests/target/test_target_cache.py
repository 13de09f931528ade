"""Rows of the cache: written once, moved in place, dropped by forgetting their number."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash import room
from treeflash.errors import InputError
from treeflash.target import HuggingFaceTarget
from treeflash.target.cache import TreeCache, TreeCacheLayer
from treeflash.testing.families import tiny_model
from treeflash.tree import TokenTree

from .target_helpers import row

HEADS, WIDTH = 2, 3


def rows(start: int, count: int) -> torch.Tensor:
    """Keys `[1, heads, count, d]` in which each row holds numbers of its own."""
    numbers = torch.arange(start, start + count, dtype=torch.float32)
    return numbers[:, None].expand(1, HEADS, count, WIDTH) + torch.arange(HEADS)[:, None, None] / 4


def filled(capacity: int, length: int, layers: int = 2) -> TreeCache:
    """A cache whose committed row r holds r, in layer l plus 100 l; values are the keys negated."""
    cache = TreeCache(layers, capacity)
    write(cache, 0, length)
    cache.append(length)
    return cache


def write(cache: TreeCache, first: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    states = [rows(first, count) + 100 * index for index in range(len(cache.layers))]
    return [cache.update(keys, -keys, index) for index, keys in enumerate(states)]


def held(cache: TreeCache, layer: int = 0) -> list[int]:
    """What the committed rows hold, by their number; the same in every head, keys and values."""
    keys, values = (
        states[0, :, : cache.length] for states in (cache.layers[layer].keys, -cache.layers[layer].values)
    )
    numbers = keys[0, :, 0] - 100 * layer
    assert torch.equal(keys, values)
    assert torch.equal(keys[1], keys[0] + 0.25)
    return numbers.int().tolist()


def storages(cache: TreeCache) -> list[int]:
    return [states.data_ptr() for layer in cache.layers for states in (layer.keys, layer.values)]


@given(
    length=st.integers(1, 5),
    path=st.sets(st.integers(1, 9)).map(lambda nodes: [0, *sorted(nodes)]),
    layers=st.integers(1, 3),
)
def test_the_accepted_rows_move_up_in_place(length, path, layers):
    cache = filled(16, length, layers)
    before = storages(cache)
    write(cache, 50, 10)
    cache.keep(path)
    expected = [*range(length), *(50 + node for node in path)]
    assert cache.length == len(expected)
    assert all(held(cache, layer) == expected for layer in range(layers))
    assert storages(cache) == before
    assert all(layer.keys.shape == (1, HEADS, 16, WIDTH) for layer in cache.layers)


def test_a_path_that_stands_in_order_moves_nothing():
    cache = filled(16, 4)
    write(cache, 50, 6)
    versions = [(layer.keys._version, layer.values._version) for layer in cache.layers]
    cache.keep([0, 1, 2])
    assert [(layer.keys._version, layer.values._version) for layer in cache.layers] == versions
    assert held(cache) == [0, 1, 2, 3, 50, 51, 52]


def test_only_the_rows_out_of_order_move(monkeypatch):
    moved = []
    keep = TreeCacheLayer.keep
    monkeypatch.setattr(
        TreeCacheLayer,
        "keep",
        lambda self, rows, start: (moved.append((rows.tolist(), start)), keep(self, rows, start)),
    )
    cache = filled(16, 4, layers=1)
    write(cache, 50, 6)
    cache.keep([0, 1, 4, 5])
    assert moved == [([8, 9], 6)]
    assert held(cache) == [0, 1, 2, 3, 50, 51, 54, 55]


def test_keys_and_values_are_views_up_to_the_rows_just_written():
    cache = filled(16, 4)
    for layer, (keys, values) in zip(cache.layers, write(cache, 50, 3), strict=True):
        assert keys.shape == values.shape == (1, HEADS, 7, WIDTH)
        assert (keys.data_ptr(), values.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())
        assert keys[0, 0, :, 0].remainder(100).tolist() == [0, 1, 2, 3, 50, 51, 52]
    assert cache.length == 4  # written is not committed


def test_rejected_rows_are_written_over():
    cache = filled(16, 4)
    write(cache, 50, 6)
    cache.keep([0, 3])
    write(cache, 70, 2)
    cache.keep([0, 1])
    assert held(cache) == [0, 1, 2, 3, 50, 53, 70, 71]


def test_rewinding_forgets_and_never_adds():
    cache = filled(16, 6)
    cache.rewind(torch.tensor([9]))
    assert cache.length == 6
    cache.rewind(torch.tensor([2]))
    assert held(cache) == [0, 1]
    write(cache, 50, 2)
    cache.append(2)
    assert held(cache) == [0, 1, 50, 51]
    cache.rewind(torch.tensor([0]))
    assert cache.length == 0


def test_room_is_checked_before_anything_is_written():
    cache = filled(8, 5)
    cache.reserve(3)
    message = "the cache has room for 8 positions; expected at most 3 more, found 4"
    with pytest.raises(InputError, match=message):
        cache.reserve(4)


@pytest.mark.parametrize("fails_at", range(4))
def test_room_that_is_made_in_part_is_given_back(fails_at, monkeypatch):
    """Whichever allocation fails: all layers get what is needed, and what was made in vain is freed."""
    monkeypatch.setattr(room, "_BLOCK", 8)
    cache, made, unfreed, allocate = filled(100, 7), [], [], room.empty_rows

    def empty_rows(like, rows, times=1):
        if len(made) == fails_at:
            made.append(None)
            raise InputError("no room")
        if rows == 9:  # the smaller size: a tensor of the larger one is freed, or a layer's
            held = {part.data_ptr() for layer in cache.layers for part in (layer.keys, layer.values)}
            alive = [part for part in (ref() for ref in made if ref is not None) if part is not None]
            unfreed.extend(part for part in alive if part.shape[-2] > 9 and part.data_ptr() not in held)
        states = allocate(like, rows, times)
        made.append(weakref.ref(states))
        return states

    monkeypatch.setattr(room, "empty_rows", empty_rows)
    cache.reserve(2)
    assert not unfreed
    assert {states.shape[-2] for layer in cache.layers for states in (layer.keys, layer.values)} == {9}
    write(cache, 50, 2)
    cache.append(2)
    assert held(cache, 0) == held(cache, 1) == [*range(7), 50, 51]


def test_a_layer_without_room_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(room, "_BLOCK", 8)
    cache, allocate, sizes = filled(100, 7), room.empty_rows, []

    def keys_alone(like, rows, times=1):
        sizes.append(rows)
        if len(sizes) % 2 == 0:
            raise InputError("no room")
        return allocate(like, rows, times)

    monkeypatch.setattr(room, "empty_rows", keys_alone)
    with pytest.raises(InputError, match="no room"):
        cache.reserve(2)
    assert {states.shape[-2] for layer in cache.layers for states in (layer.keys, layer.values)} == {8}
    monkeypatch.setattr(room, "empty_rows", allocate)
    cache.reserve(2)
    write(cache, 50, 2)
    cache.append(2)
    assert held(cache, 0) == held(cache, 1) == [*range(7), 50, 51]


def test_a_layer_says_how_much_it_holds():
    cache = filled(8, 5)
    assert cache.get_seq_length() == 5
    assert cache.layers[1].get_mask_sizes(3) == (8, 0)
    assert cache.layers[1].get_max_length() == 8


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_decoding_allocates_the_cache_once(monkeypatch, family, device):
    allocated = []
    lazy = TreeCacheLayer.lazy_initialization
    monkeypatch.setattr(
        TreeCacheLayer,
        "lazy_initialization",
        lambda self, keys, values: (allocated.append(self), lazy(self, keys, values)),
    )
    target = HuggingFaceTarget(tiny_model(family, device=device))
    state = target.start(1, 24, (0,))
    tree = TokenTree.from_lists([1, 2, 3, 4], [-1, 0, 0, 2], device=device)
    with torch.no_grad():
        target.prefill(state, row([1, 2, 3, 4, 5, 6, 7], device))
        before = storages(state.cache)
        for path in ([0, 2, 3], [0], [0, 1], [0, 2, 3]):
            target.verify(state, tree)
            target.commit(state, [path])
        target.rewind(state, torch.tensor([5]))
        target.prefill(state, row([8, 9], device))
    assert state.cache.length == 7
    assert storages(state.cache) == before
    assert len(allocated) == 2
    assert all(layer.keys.shape[-2] == 24 for layer in state.cache.layers)
    # Keys and values in the model's own dtype, where it runs.
    assert {(layer.keys.dtype, layer.keys.device) for layer in state.cache.layers} == {
        (target.dtype, target.device)
    }


def test_a_tree_or_prompt_without_room_is_refused_and_changes_nothing(device):
    target = HuggingFaceTarget(tiny_model("llama", device=device))
    state = target.start(1, 6, ())
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 0], device=device)
    with torch.no_grad():
        target.prefill(state, row([1, 2, 3, 4], device))
        with pytest.raises(InputError, match="expected at most 2 more, found 3"):
            target.verify(state, tree)
        with pytest.raises(InputError, match="expected at most 2 more, found 3"):
            target.prefill(state, row([1, 2, 3], device))
        assert state.cache.length == 4
        assert target.verify(state, tree.first(2)).logits.shape == (1, 2, 40)


def test_states_do_not_share_rows(device):
    target = HuggingFaceTarget(tiny_model("llama", dtype=torch.float64, device=device))
    tree = TokenTree.from_lists([1, 2, 3], [-1, 0, 0], device=device)
    one, other = target.start(1, 16, ()), target.start(1, 16, ())
    with torch.no_grad():
        target.prefill(one, row([1, 2, 3], device))
        alone = target.verify(one, tree).logits
        target.prefill(other, row([9, 8, 7, 6, 5], device))
        target.verify(other, tree)
        assert torch.equal(target.verify(one, tree).logits, alone)
