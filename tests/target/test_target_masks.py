"""Masks by position, against a loop over every pair."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config

import treeflash.target.hugging_face as hugging_face
from treeflash.errors import UnsupportedTargetError
from treeflash.target.masks import additive_masks, layer_windows
from treeflash.tree import TokenTree

from .target_helpers import BROAD, DEEP, WINDOW, plain, row, shared_target, trees

dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)


@pytest.fixture
def masks_read(monkeypatch):
    """Records the masks that a target gives to its model."""
    masks = []

    def record(*args):
        masks.append(additive_masks(*args))
        return masks[-1]

    monkeypatch.setattr(hugging_face, "additive_masks", record)
    return masks


@given(
    data=st.data(),
    queries=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    keys=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    window=st.integers(1, 12),
)
def test_a_window_counts_positions_not_rows(data, queries, keys, window):
    bits = st.lists(st.booleans(), min_size=len(keys), max_size=len(keys))
    visible = [data.draw(bits) for _ in queries]
    windows = {"full_attention": None, "sliding_attention": window}
    masks = additive_masks(
        windows, torch.tensor([visible]), torch.tensor([queries]), torch.tensor([keys]), torch.float32
    )
    assert set(masks) == set(windows)
    for kind, mask in masks.items():
        assert mask.shape == (1, 1, len(queries), len(keys))
        for i, query in enumerate(queries):
            for j, key in enumerate(keys):
                seen = visible[i][j] and (kind == "full_attention" or query - key < window)
                assert (mask[0, 0, i, j] == 0) == seen
                assert mask[0, 0, i, j] in (0, -torch.inf)


@dtypes
def test_masks_have_the_models_dtype(dtype, device):
    positions = torch.arange(3, device=device)[None]
    visible = positions[:, None, :] <= positions[:, :, None]
    mask = additive_masks({"full_attention": None}, visible, positions, positions, dtype)
    assert (mask.dtype, mask.device.type, tuple(mask.shape)) == (dtype, device, (1, 1, 3, 3))
    # Any finite number may be outweighed by a score.
    assert mask[0, 0].isneginf().tolist() == (~visible[0]).tolist()


def test_one_kind_of_layer_takes_one_mask():
    positions = torch.arange(4)[None]
    visible = positions[:, None, :] <= positions[:, :, None]
    mask = additive_masks({"sliding_attention": 2}, visible, positions, positions, torch.float32)
    assert (mask[0, 0] == 0).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]


def slow_sight(tokens: int, tree: TokenTree, window: int | None) -> list[list[bool]]:
    """Which cached rows and nodes each node sees, by walking its path."""
    sight = []
    for node in range(tree.size):
        path = tree.path_to(node)
        position = tokens + len(path) - 1
        near = [window is None or position - other < window for other in range(position + 1)]
        among = [other in path and near[tokens + path.index(other)] for other in range(tree.size)]
        sight.append([*near[:tokens], *among])
    return sight


@pytest.mark.parametrize("family", ["gemma3", "mistral", "llama"])
@pytest.mark.parametrize("count", [2, WINDOW, 11])
@pytest.mark.parametrize("shape", [BROAD, DEEP], ids=["broad", "deep"])
def test_nodes_see_the_cache_and_their_ancestors_within_the_window(masks_read, family, count, shape, device):
    target = shared_target(family, torch.float32, device)
    tree = TokenTree.from_lists(*shape, device=device)
    state = target.start(1, 32, ())
    with torch.no_grad():
        target.prefill(state, row(list(range(count)), device))
        target.verify(state, tree)
    mask = masks_read[-1]
    by_kind = mask if isinstance(mask, dict) else {next(iter(target.windows)): mask}
    assert by_kind.keys() == target.windows.keys()
    for kind, found in by_kind.items():
        assert (found[0, 0] == 0).tolist() == slow_sight(count, tree, target.windows[kind])


@given(shape=trees(), count=st.integers(1, 12))
def test_sight_of_any_tree(shape, count):
    # As above, from the same pieces, for trees of every shape.
    tree = TokenTree.from_lists(*shape)
    queries = count + tree.depths
    keys = torch.cat([torch.arange(count)[None], queries], dim=1)
    visible = torch.cat([torch.ones(1, tree.size, count, dtype=torch.bool), tree.ancestor_mask()], dim=2)
    mask = additive_masks({"sliding_attention": WINDOW}, visible, queries, keys, torch.float32)
    assert (mask[0, 0] == 0).tolist() == slow_sight(count, tree, WINDOW)


def test_a_shallow_node_in_a_late_row_keeps_its_whole_window(device):
    # Row 9 of the tree is at depth 1, five positions behind a prompt of four: by position it sees
    # all but the first token, by index it would see no token of the prompt at all.
    target = shared_target("mistral", torch.float64, device)
    tree = TokenTree.from_lists(*BROAD, device=device)
    prompt = [11, 3, 29, 17]
    with torch.no_grad():
        state = target.start(1, 32, ())
        target.prefill(state, row(prompt, device))
        node = target.verify(state, tree).logits[0, 9]
        outside = target.start(1, 32, ())
        target.prefill(outside, row([8, *prompt[1:]], device))
        other = target.verify(outside, tree).logits[0, 9]
    expected = plain(target.model, [*prompt, BROAD[0][0], BROAD[0][9]])[-1]
    assert float((node - expected).abs().max()) < 1e-9
    # The first token reaches it through the second layer alone, as in the model itself.
    changed = plain(target.model, [8, *prompt[1:], BROAD[0][0], BROAD[0][9]])[-1]
    assert float((other - changed).abs().max()) < 1e-9


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LlamaConfig(), {"full_attention": None}),
        (MistralConfig(sliding_window=7), {"sliding_attention": 7}),
        (MistralConfig(sliding_window=None), {"full_attention": None}),
        # Qwen names a window that it does not use unless told to.
        (Qwen2Config(sliding_window=7), {"full_attention": None}),
        (
            Qwen2Config(sliding_window=7, use_sliding_window=True, max_window_layers=1, num_hidden_layers=3),
            {"full_attention": None, "sliding_attention": 7},
        ),
        (
            Qwen2Config(sliding_window=7, use_sliding_window=True, max_window_layers=0, num_hidden_layers=3),
            {"sliding_attention": 7},
        ),
        (Gemma3TextConfig(sliding_window=7), {"full_attention": None, "sliding_attention": 7}),
        (SimpleNamespace(), {"full_attention": None}),
        (SimpleNamespace(layer_types=["full_attention"], sliding_window=7), {"full_attention": None}),
    ],
)
def test_windows_are_those_of_the_layers(config, windows):
    assert layer_windows(config) == windows


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"layer_types": ["full_attention", "linear_attention", "conv"]}, "kind conv, linear_attention:"),
        ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ({"alibi": True}, "ALiBi"),
        ({"window_size": 256}, "window_size = 256"),
        ({"layer_types": ["sliding_attention"]}, "without a sliding_window"),
    ],
)
def test_layers_without_rows_by_position_are_refused(config, reason):
    with pytest.raises(UnsupportedTargetError, match=reason):
        layer_windows(SimpleNamespace(**config))
