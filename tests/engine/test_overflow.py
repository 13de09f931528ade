"""Drafted tokens whose embeddings, keys or values are not finite do not change the text."""

from functools import cache

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treeflash import interfaces, tree
from treeflash.components.selectors import opt_tree
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.verifiers import sdpa_tree
from treeflash.engine import Decoder
from treeflash.engine.audit import MISMATCH, audited
from treeflash.interfaces import Drafter
from treeflash.plugins import Registry
from treeflash.proposal import TableProposal
from treeflash.recipe import Recipe
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.reference import reference_text
from treeflash.types import Transitions

VOCAB = 40
DEPTH = 4
# Families whose first layer's keys and values come from maps of their own.
APART = ("llama", "mistral", "gemma3")
OTHERS = ("gpt2", "gpt-oss", "qwen3-moe")
LOW = {torch.float16, torch.bfloat16}


@cache
def target_of(family, dtype, reading, device):
    model = tiny_model(family, vocab_size=VOCAB, dtype=dtype, device=device)
    return wrap_model(model, lean=reading == "lean")


@attrs.define(eq=False)
class Poisoner(Drafter):
    """Drafts the text with other tokens beside its own, at each depth in an order of its choice."""

    text: list[int]
    others: list[int]
    orders: list[list[int]]
    weights: list[float]
    drafts_blocks = False
    max_depth = DEPTH

    def start(self, batch_size, capacity):
        return [0]

    def extend(self, state, token_ids, taps, counts):
        state[0] += int(counts[0])

    def rewind(self, state, lengths):
        raise AssertionError("nothing is rewound")

    def propose(self, state, recent, limits):
        place, rows = state[0] + 1, []
        for depth in range(limits.depth):
            truth = self.text[place + depth] if place + depth < len(self.text) else 0
            choices = list(dict.fromkeys([truth, *self.others]))
            choices += [token for token in range(3, VOCAB) if token not in choices]
            rows.append([choices[index] for index in self.orders[depth]])
        token_ids = torch.tensor(rows, device=recent.device)[None, :, None]
        log_probs = torch.tensor(self.weights, device=recent.device).expand(token_ids.shape)
        return TableProposal(recent[:, 1], Transitions(token_ids, log_probs, torch.zeros_like(token_ids)))


@attrs.frozen
class Case:
    """One drawn target, its poisoned tokens, and how they are drafted."""

    family: str
    reading: str
    dtype: torch.dtype
    prompt: list[int]
    part: str
    value: float
    poisoned: int
    in_text: bool
    temperature: float
    orders: list[list[int]]
    weights: list[float]
    budget: int
    empty_slots: bool


SAMPLE = Case(
    family="llama",
    reading="lean",
    dtype=torch.float32,
    prompt=[3, 1, 4],
    part="embedding",
    value=float("nan"),
    poisoned=1,
    in_text=False,
    temperature=0.0,
    orders=[[0, 1, 2, 3]] * DEPTH,
    weights=[-0.1, -1.5, -2.0, -3.0],
    budget=9,
    empty_slots=False,
)


@st.composite
def cases(draw):
    part = draw(st.sampled_from(["embedding", "keys", "values"]))
    return Case(
        family=draw(st.sampled_from([*APART, *OTHERS] if part == "embedding" else APART)),
        reading=draw(st.sampled_from(["lean", "library"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64, *LOW])),
        prompt=draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)),
        part=part,
        # Shares of the dtype's range too: embeddings overflow once scaled, scores outweigh finite masks.
        value=draw(st.sampled_from([float("nan"), float("inf"), float("-inf"), 1.0, 0.5, 0.1, 0.03])),
        poisoned=draw(st.integers(1, 2)),
        in_text=draw(st.sampled_from([False, False, False, True])),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.8])),
        orders=[draw(st.permutations(range(4))) for _ in range(DEPTH)],
        weights=draw(
            st.sampled_from([[-0.1, -1.5, -2.0, -3.0], [-1.4] * 4, [float("nan"), -1.0, -1.0, -2.0]])
        ),
        budget=draw(st.integers(1, 14)),
        empty_slots=draw(st.booleans()),
    )


def as_on_a_gpu(patch):
    """Trees are not cut to their nodes, and all nodes' tokens are chosen at once."""
    for module in (opt_tree, tree, interfaces):
        patch.setattr(module, "trims", lambda device: False)
    patch.setattr(sdpa_tree, "chooses_on_the_way", lambda device: False)


class Poison:
    """Makes what a model has of some tokens overflow, or not finite, while it is entered."""

    def __init__(self, model, case, tokens):
        embedding, largest = model.get_input_embeddings().weight, torch.finfo(case.dtype).max
        tokens = torch.tensor(tokens, dtype=torch.int64, device=embedding.device)
        finite = case.value if abs(case.value) <= 1 else None
        self.changed = []
        if case.part == "embedding":
            self.changed.append((embedding, tokens, case.value if finite is None else finite * largest))
        else:
            # A dimension that no other token has, and a map that makes too much of it.
            attention = model.get_decoder().layers[0].self_attn
            weight = (attention.k_proj if case.part == "keys" else attention.v_proj).weight
            self.changed.append((embedding, (slice(None), 0), 0.0))
            self.changed.append((embedding, (tokens, 0), 8.0))
            self.changed.append((weight, (slice(None), 0), largest if finite is None else finite * largest))
            if finite is None:
                self.changed.append((embedding, (tokens, 1), case.value))

    @torch.no_grad()
    def __enter__(self):
        self.before = [(weight, weight.clone()) for weight, _, _ in self.changed]
        for weight, place, value in self.changed:
            weight[place] = value

    @torch.no_grad()
    def __exit__(self, *_):
        for weight, whole in reversed(self.before):
            weight.copy_(whole)


def check(case, device):
    target = target_of(case.family, case.dtype, case.reading, device)
    model, new, choose = target.model, 14, {"temperature": case.temperature, "seed": 5}
    with Poison(model, case, []):
        plain = reference_text(model, case.prompt, new, **choose)
    written = {*case.prompt, *plain}
    free = [token for token in range(VOCAB) if (token in written) == case.in_text]
    poisoned = free[: case.poisoned]
    with Poison(model, case, poisoned):
        drafter = Poisoner([*case.prompt, *plain], poisoned, case.orders, case.weights)
        decoder = Decoder(target, drafter, selector=OptTree(case.budget))
        if case.dtype in LOW:
            # A tree and a row round differently there.
            _, audit = audited(decoder, case.prompt, max_new_tokens=new, **choose)
            assert case.in_text or audit.kind != MISMATCH
            return
        if case.in_text:
            # From some token on the target itself is at a loss: what is then written is still its own.
            plain = Decoder(target).generate(case.prompt, max_new_tokens=new, **choose).token_ids
        found = decoder.generate(case.prompt, max_new_tokens=new, **choose)
    assert list(found.token_ids) == list(plain)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_nothing_drafted_changes_a_text(case, device):
    with pytest.MonkeyPatch.context() as patch:
        if case.empty_slots:
            as_on_a_gpu(patch)
        check(case, device)


@pytest.mark.parametrize("reading", ["lean", "library"])
def test_empty_slots_hold_no_token_that_overflows(reading, device, monkeypatch):
    """Where a tree is padded, drafts go on being accepted, whichever token overflows."""
    as_on_a_gpu(monkeypatch)
    target = target_of("llama", torch.float32, reading, device)
    texts = ([first, *reference_text(target.model, [first], 20)] for first in range(1, VOCAB))
    text = next(text for text in texts if 0 not in text)
    prompt, plain = text[:1], text[1:]
    with Poison(target.model, SAMPLE, [0]):
        # One likely child a node, and more slots than nodes.
        drafter = Poisoner(text, [], SAMPLE.orders, [-0.1, *[-torch.inf] * 3])
        found = Decoder(target, drafter, selector=OptTree(9)).generate(prompt, max_new_tokens=20)
    assert list(found.token_ids) == plain
    assert found.statistics.block_efficiency > DEPTH


class Spoiled:
    """A target whose tapped states are not finite."""

    def __init__(self, target, value):
        self._target, self._value = target, value

    def __getattr__(self, name):
        return getattr(self._target, name)

    def prefill(self, state, token_ids):
        output = self._target.prefill(state, token_ids)
        return attrs.evolve(output, taps=torch.full_like(output.taps, self._value))

    def verify(self, state, tree):
        output = self._target.verify(state, tree)
        return attrs.evolve(output, taps=torch.full_like(output.taps, self._value))


@pytest.mark.parametrize(
    ("name", "value"),
    [("tiny-dflash", torch.inf), ("tiny-ddtree", torch.nan), ("tiny-treeflash-two-token", torch.nan)],
)
def test_states_that_are_not_finite_stop_drafting_alone(name, value):
    registry = Registry.load()
    decoder = Recipe.load(name, registry, {"target": {"device": "cpu"}}).build(registry)
    prompt = [2, *b"Ana has 7 apples."]
    plain = Decoder(decoder.target).generate(prompt, max_new_tokens=12)
    found = attrs.evolve(decoder, target=Spoiled(decoder.target, value)).generate(prompt, max_new_tokens=12)
    assert found.token_ids == plain.token_ids
    assert all(step.num_drafted == 0 for step in found.statistics.steps)
