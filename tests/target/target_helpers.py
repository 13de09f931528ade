"""What the tests of the target share: trees to read, and the model's own forward to compare with."""

import functools

import attrs
import torch
from hypothesis import strategies as st

from treeflash.target import HuggingFaceTarget
from treeflash.target.lean import LeanDecoder
from treeflash.testing.families import FAMILIES, tiny_model
from treeflash.tree import TokenTree

VOCAB = 40
WINDOW = 5  # of every family that has one
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
# Families by their own forward, and some by the pass of ours.
READINGS = [*FAMILIES, "lean llama", "lean mistral", "lean qwen2", "lean qwen3"]
NO_SDPA = {"gemma2", "gpt-oss"}
# Families that round to float32 in the midst of their attention, whatever their dtype.
ROUNDED = {"gemma2"}

token_ids = st.integers(0, VOCAB - 1)
# Shorter than the window, as long, and well beyond it.
prompts = st.lists(token_ids, min_size=3, max_size=14)

# Three levels; the rows run across the branches, so no row but the first two is its own position, and
# row 9 is at depth 1.
BROAD = ([7, 1, 2, 3, 4, 5, 6, 8, 9, 10], [-1, 0, 0, 1, 2, 3, 4, 1, 0, 0])
# Long enough for a node to be out of sight of its own ancestors, whose rows lie behind their positions.
DEEP = ([7, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11], [-1, 0, 0, 0, 3, 4, 5, 6, 7, 8, 5])
BROAD_PROMPT = [11, 3, 29, 17, 5, 38, 22, 9, 14]


@st.composite
def trees(draw, max_nodes: int = 9) -> tuple[list[int], list[int]]:
    """Token ids and parents of a tree of any shape."""
    ids, parents = [draw(token_ids)], [-1]
    taken = set()
    for node in range(1, draw(st.integers(1, max_nodes))):
        parent, token = draw(st.integers(0, node - 1)), draw(token_ids)
        while (parent, token) in taken:  # siblings differ
            token = (token + 1) % VOCAB
        taken.add((parent, token))
        ids.append(token)
        parents.append(parent)
    return ids, parents


# Made without the probe, so that a tree read wrongly fails the test that says so.
@functools.cache
def shared_target(family: str, dtype: torch.dtype, device: str) -> HuggingFaceTarget:
    *lean, family = family.split()
    model = tiny_model(family, vocab_size=VOCAB, dtype=dtype, device=device)
    target = HuggingFaceTarget(model, attention="eager" if family in NO_SDPA else "sdpa")
    if lean:
        target.lean = LeanDecoder.of(model)
        assert target.lean is not None
    return target


def row(ids: list[int], device) -> torch.Tensor:
    return torch.tensor([ids], device=device)


def plain(model, ids: list[int]) -> torch.Tensor:
    """Logits of every position by the model's own forward: no cache, no mask, no positions given."""
    with torch.no_grad():
        return model(input_ids=row(ids, model.device), use_cache=False).logits[0]


def at_nodes(tree: TokenTree, committed: list[int], read) -> torch.Tensor:
    """What `read` (sequence to a row per position) gives at each node, each path read by itself."""
    ids = tree.token_ids[0].tolist()
    count = int(tree.num_nodes[0])
    inner = set(tree.parents[0, :count].tolist())
    rows = [None] * count
    for leaf in (node for node in range(count) if node not in inner):
        path = tree.path_to(leaf)
        out = read(committed + [ids[node] for node in path])
        for depth, node in enumerate(path):
            rows[node] = out[len(committed) + depth]
    return torch.stack(rows)


def padded(tree: TokenTree, slots: int, **held: int) -> TokenTree:
    """The same tree with empty slots behind it, which hold the given values."""
    holding = {"token_ids": 0, "parents": -1, "depths": 0, "log_weights": 0, **held}

    def widen(name: str) -> torch.Tensor:
        tensor = getattr(tree, name)
        return torch.cat([tensor, tensor.new_full((1, slots), holding[name])], dim=1)

    return attrs.evolve(tree, **{name: widen(name) for name in holding})


def assert_close(found: torch.Tensor, expected: torch.Tensor, family: str = "llama") -> None:
    """The largest difference, in units of the expected values' spread, is one of rounding."""
    assert found.shape == expected.shape
    tolerance = TOLERANCE[torch.float32 if family in ROUNDED else expected.dtype]
    error = float((found - expected).abs().max() / expected.std())
    assert error <= tolerance, f"{error:.1e} of the spread"
