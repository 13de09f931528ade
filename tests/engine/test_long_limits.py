"""Room is made for the text that is written, not for the longest that is allowed."""

import attrs
import pytest
import torch

from treeflash import room
from treeflash.components.builders.marginal import Marginal
from treeflash.components.drafters.draft_model import DraftModel
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import InputError
from treeflash.interfaces import Selector
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.room import empty_rows, rows_to_make
from treeflash.target import HuggingFaceTarget, wrap_model
from treeflash.target.cache import TreeCacheLayer
from treeflash.testing.families import tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text

ENDLESS = 10**13
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def small_blocks(monkeypatch):
    """Room for a few rows is made at a time."""
    monkeypatch.setattr(room, "_BLOCK", 4)


@attrs.frozen
class AsManyAsThereAre(Selector):
    """Asks for all that it is offered, and takes little of it."""

    def plan(self, steps, limits):
        return limits

    def select(self, proposal, limits):
        return OptTree(5).select(proposal, attrs.evolve(limits, nodes=5))


def endless_model(family, device, **changes):
    return tiny_model(family, device=device, dtype=torch.float64, max_position_embeddings=1 << 50, **changes)


@pytest.mark.parametrize("drafter", ["none", "oracle", "draft-model"])
@pytest.mark.parametrize(
    ("family", "selector"), [("llama", AsManyAsThereAre()), ("gemma3", OptTree(9))], ids=["llama", "gemma3"]
)
def test_a_text_without_a_limit(family, drafter, selector, device, small_blocks, monkeypatch):
    model = endless_model(family, device)
    target = wrap_model(model)
    plain = reference_text(model, PROMPT, 40)
    made = []
    allocate = TreeCacheLayer.lazy_initialization
    monkeypatch.setattr(
        TreeCacheLayer,
        "lazy_initialization",
        lambda self, *states: (made.append(self), allocate(self, *states)),
    )
    parts = {
        "none": lambda: {},
        "oracle": lambda: {
            "drafter": Oracle([*PROMPT, *plain], [0.8] * 4),
            "builder": Marginal(),
            "refiner": NoRefiner(),
        },
        "draft-model": lambda: {"drafter": DraftModel(HuggingFaceTarget(model), depth=3, children=2)},
    }[drafter]()
    decoder, found = Decoder(target, selector=selector, **parts), []
    for emission in decoder.stream(PROMPT, max_new_tokens=ENDLESS, stop_ids=()):
        found += emission.token_ids
        if len(found) >= 40:
            break
    assert found[:40] == plain
    # Rows of the text and of its largest tree, and half as many again at most.
    assert made
    assert all(layer.keys.shape[-2] < 2 * (len(PROMPT) + len(found) + 16) for layer in made)


@pytest.mark.parametrize("name", ["tiny-treeflash", "tiny-draft-model"])
def test_drafters_make_room_as_they_go(name, small_blocks, monkeypatch):
    registry = Registry.load()
    decoder = Recipe.load(name, registry, {"target": {"device": "cpu"}}).build(registry)
    prompt = [2, *b"Ana has 7 apples."]
    steps = {}
    for block in (4, 1024):
        monkeypatch.setattr(room, "_BLOCK", block)
        generation = decoder.generate(prompt, max_new_tokens=60)
        steps[block] = generation.token_ids, [step.num_accepted for step in generation.statistics.steps]
    assert steps[4] == steps[1024]
    monkeypatch.setattr(decoder.target, "max_positions", None)
    for emission in decoder.stream(prompt, max_new_tokens=ENDLESS):
        if emission.record is not None:
            break


def test_what_can_never_fit_is_refused_with_figures(device, small_blocks, monkeypatch):
    model = tiny_model("llama", device=device)
    target, plain = HuggingFaceTarget(model), reference_text(model, PROMPT, 40)
    # Keys and values of a position take 256 bytes in two layers.
    monkeypatch.setattr(room, "_memory", lambda device: 48 * 256)
    assert list(Decoder(target).generate(PROMPT, max_new_tokens=40).token_ids) == plain
    told = r"keys and values of 49 positions take 12,544 bytes.* memory of 12,288 bytes of cpu has no room"
    with pytest.raises(InputError, match=told):
        Decoder(target).generate(PROMPT, max_new_tokens=50)
    with pytest.raises(InputError, match="keys and values of 61 positions"):
        Decoder(target).generate(list(range(30)) * 2, max_new_tokens=50)


def test_memory_that_is_taken_is_told(monkeypatch):
    like = torch.empty(1, 2, 1, 8)
    monkeypatch.setattr(room, "_memory", lambda device: None)
    with pytest.raises(
        InputError, match=r"of 100000000000000 positions take 6,400,000\.0 GB, which the memory of"
    ):
        empty_rows(like, 10**14)


def test_a_growing_text_seldom_copies(small_blocks):
    rows, copies = rows_to_make(0), 0
    for needed in range(1, 10_000):
        if needed > rows:
            rows, copies = rows_to_make(needed, rows), copies + 1
        assert needed <= rows <= 2 * max(needed, 4)
    assert copies < 25
    assert rows_to_make(5, 0, 5) == 5
    assert rows_to_make(7, 4, 100) == 8
