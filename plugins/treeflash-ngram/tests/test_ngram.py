"""The drafter: its drafts, and that the text stays the target's own."""

import math

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from treeflash_ngram.drafter import Ngram

import treeflash
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import RecipeError
from treeflash.target import wrap_model
from treeflash.testing.contracts import DrafterContract
from treeflash.testing.families import tiny_model
from treeflash.testing.reference import reference_text
from treeflash.tree import TokenTree
from treeflash.types import Limits

tokens = st.integers(0, 3)


class TestNgram(DrafterContract):
    def make(self, target):
        return Ngram()


class TestShortAndNarrowNgram(DrafterContract):
    def make(self, target):
        return Ngram(longest=1, depth=3, children=2)


def propose(drafter, texts, limits):
    """The draft behind texts, each up to its last token, the anchor."""
    state = drafter.start(len(texts), 64)
    length = max(map(len, texts)) - 1
    rows = [[*text[:-1], *[0] * (length - len(text) + 1)] for text in texts]
    counts = torch.tensor([len(text) - 1 for text in texts])
    drafter.extend(state, torch.tensor(rows).view(len(texts), length), None, counts)
    return drafter.propose(state, torch.tensor([[0, 0, *text][-2:] for text in texts]), limits)


def slow_paths(slow, text, drafter, depth):
    """Every path that can be drafted with its weight, level by level from the token list."""
    found = {(): 1.0}
    level = [()]
    for _ in range(depth):
        below = []
        for path in level:
            likely = slow(text[:-1], [*text, *path], drafter.longest)
            best = sorted(likely.values(), reverse=True)[: drafter.children]
            assert len(best) == len(likely), "all children are kept here"
            for token, probability in likely.items():
                found[(*path, token)] = found[path] * probability
                below.append((*path, token))
        level = below
    del found[()]
    return found


@settings(max_examples=150)
@given(
    text=st.lists(tokens, min_size=1, max_size=30),
    longest=st.integers(1, 3),
    depth=st.integers(1, 4),
    budget=st.integers(1, 12),
)
def test_the_tree_is_the_heaviest_of_all(slow, text, longest, depth, budget):
    drafter = Ngram(longest=longest, depth=4, children=4)
    limits = Limits(budget, depth)
    tree = OptTree(budget).select(propose(drafter, [text], limits), limits)
    tree.validate()
    expected = slow_paths(slow, text, drafter, depth)
    found = dict(zip(tree.paths(), tree.log_weights[0, 1:].tolist(), strict=True))
    assert len(found) == min(budget, len(expected))
    for path, weight in found.items():
        assert weight == pytest.approx(math.log(expected[path]), abs=1e-4)
    heaviest = sorted(expected.values(), reverse=True)[:budget]
    assert sorted(found.values(), reverse=True) == pytest.approx([math.log(w) for w in heaviest], abs=1e-4)


@given(texts=st.lists(st.lists(tokens, min_size=1, max_size=20), min_size=2, max_size=3))
def test_rows_do_not_know_each_other(texts):
    drafter, limits = Ngram(depth=3), Limits(5, 3)
    together = OptTree(5).select(propose(drafter, texts, limits), limits)
    for row, text in enumerate(texts):
        alone = OptTree(5).select(propose(drafter, [text], limits), limits)
        assert together.paths(row) == alone.paths()


@pytest.mark.parametrize("selector", [OptTree(9), Chain()])
@pytest.mark.parametrize("text", [[7], [1, 2, 3, 4]])
def test_where_nothing_matches_nothing_is_drafted(selector, text):
    proposal = propose(Ngram(), [text], Limits(9, 8))
    assert proposal.depth == 0
    tree = selector.select(proposal, Limits(9, 8))
    assert (tree.num_nodes.tolist(), tree.token_ids.tolist()) == ([1], [[text[-1]]])


def test_a_chain_follows_a_text_that_repeats_itself():
    text = [5, 3, 8, 2, 9] * 4
    proposal = propose(Ngram(), [text], Limits(8, 8))
    tree = Chain().select(proposal, Limits(8, 8))
    assert tree.token_ids[0].tolist() == [9, 5, 3, 8, 2, 9, 5, 3, 8]


@pytest.mark.parametrize("selector", [OptTree(10), Chain()])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_text_is_the_targets_own(family, temperature, selector):
    target = wrap_model(tiny_model(family, vocab_size=12, dtype=torch.float64))
    prompt, settings = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], {"temperature": temperature, "seed": 4}
    result = Decoder(target, Ngram(longest=3), selector=selector).generate(
        prompt, max_new_tokens=40, **settings
    )
    assert list(result.token_ids) == reference_text(target.model, prompt, 40, **settings)
    assert any(step.num_drafted for step in result.statistics.steps)


def replayed(prompt, answer, selector):
    """Tokens a step if a target wrote this answer behind this prompt."""
    drafter, text = Ngram(), [*prompt, *answer]
    state = drafter.start(1, len(text))
    known, steps = 0, 0
    anchor = len(prompt)  # the first token of the answer comes from reading the prompt
    while anchor < len(text) - 1:
        drafter.extend(state, torch.tensor([text[known:anchor]]), None, torch.tensor([anchor - known]))
        limits = Limits(10, min(8, len(text) - anchor - 2))
        tree = TokenTree.root_only(torch.tensor([text[anchor]]))
        if limits.depth:
            tree = selector.select(
                drafter.propose(state, torch.tensor([text[anchor - 1 : anchor + 1]]), limits), limits
            )
        drafted, accepted = set(tree.paths()), 0
        while tuple(text[anchor + 1 : anchor + 2 + accepted]) in drafted:
            accepted += 1
        known, anchor, steps = anchor, anchor + accepted + 1, steps + 1
    return (len(answer) - 1) / steps


def test_a_text_that_says_its_prompt_again_is_drafted_almost_whole():
    prompt = list(b"def area(width, height):\n    return width * height\n")
    # 8.0 and 6.9 tokens a step; 9 are the most that eight levels give.
    assert replayed(prompt, prompt * 3, OptTree(10)) > 7
    assert replayed(prompt, prompt * 3, Chain(8)) > 6


def test_a_text_that_says_nothing_twice_is_decoded_plainly():
    assert replayed(range(50), range(50, 90), OptTree(10)) == 1


@pytest.fixture(autouse=True)
def costs_of_its_own(tmp_path, monkeypatch):
    """What is measured here is kept nowhere else."""
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path / "cache"))


def test_the_recipe_decodes_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    decoder = treeflash.load("ngram", target={"device": "cpu"})
    assert decoder.drafter == Ngram()
    prompt = decoder.target.text.encode_chat("Ana has 7 apples.")
    result = decoder.generate(prompt, max_new_tokens=160)
    plain = treeflash.load("tiny-plain", target={"device": "cpu"}).generate(prompt, max_new_tokens=160)
    assert result.token_ids == plain.token_ids
    assert any(step.num_accepted for step in result.statistics.steps)
    # How many nodes are worth it goes by the clock; at most there are as many as the recipe says.
    timeless = attrs.evolve(decoder, selector=decoder.selector.without_clock())
    result = timeless.generate(prompt, max_new_tokens=160)
    assert result.token_ids == plain.token_ids
    assert result.statistics.block_efficiency > 2
    assert max(step.num_drafted for step in result.statistics.steps) == 15


def test_the_recipe_takes_another_target(tmp_path):
    tiny_model("gpt2").save_pretrained(tmp_path / "model")
    decoder = treeflash.load("ngram", target={"model": str(tmp_path / "model"), "device": "cpu"})
    result = decoder.generate([1, 2, 3, 1, 2], max_new_tokens=20)
    assert list(result.token_ids) == reference_text(decoder.target.model, [1, 2, 3, 1, 2], 20)


def test_options_out_of_range_are_named():
    options = {"longest": 0, "depth": 0, "children": "8", "longes": 3}
    with pytest.raises(RecipeError) as error:
        treeflash.load("ngram", drafter=options)
    message = str(error.value)
    for fault in (
        " overridden): 4 faults",
        "drafter.longes: unknown key; did you mean 'longest'? (known: children, depth, longest)",
        "drafter.longest: expected >= 1, found 0",
        "drafter.depth: expected >= 1, found 0",
        "drafter.children: expected an integer, found '8'",
    ):
        assert fault in message
    with pytest.raises(RecipeError, match=r"drafter\.longest: expected <= 32, found 33"):
        treeflash.load("ngram", drafter={"longest": 33})


def test_a_builder_or_refiner_behind_it_is_a_mistake():
    with pytest.raises(RecipeError, match=r"builder\.use: expected none, because drafter 'ngram' gives no"):
        treeflash.load("ngram", builder={"use": "top-m"})
