"""The product: whatever is drafted, the text is the target's own."""

from collections import Counter
from functools import cache, partial

import attrs
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config

from treeflash import interfaces, tree
from treeflash.checkpoints.dflash_layout import DFlashFacts
from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.components.refiners.bilinear import Bilinear, BilinearNetwork
from treeflash.components.refiners.linear import Linear, LinearNetwork
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu, SwiGluNetwork
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.selectors import chain, opt_tree
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.cost_aware import CostAware
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.verifiers import sdpa_tree
from treeflash.costs import PassCosts
from treeflash.engine import Decoder
from treeflash.target import wrap_model
from treeflash.testing.families import FAMILIES, tiny_model
from treeflash.testing.oracle import Oracle
from treeflash.testing.reference import reference_text

BLOCK = 8


@cache
def target_of(family, dtype, vocab_size, seed, reading, device):
    # The compiler reasons about each layer anew.
    fewer = {"num_hidden_layers": 1} if reading == "compiled" else {}
    model = tiny_model(family, vocab_size=vocab_size, seed=seed, dtype=dtype, device=device, **fewer)
    return wrap_model(model, lean=reading != "library", compiled=reading == "compiled")


@pytest.fixture(scope="module")
def tally():
    """How often each depth was accepted and rejected over all examples; vacuous runs fail."""
    counts = Counter()
    yield counts
    if counts["examples"] < 50:
        return  # a part of the suite was picked by hand
    for depth in range(1, BLOCK):
        assert counts["accepted", depth] > 10, f"depth {depth} was hardly ever accepted: {counts}"
        assert counts["rejected", depth] > 10, f"depth {depth} was hardly ever rejected: {counts}"


def count(tally, emissions):
    """A depth is rejected where the last accepted node has children there, and the target took none."""
    tally["examples"] += 1
    for emission in emissions:
        if emission.tree is not None:
            reached = len(emission.path) - 1
            for depth in range(1, reached + 1):
                tally["accepted", depth] += 1
            count = int(emission.tree.num_nodes[0])
            if emission.path[-1] in emission.tree.parents[0, 1:count].tolist():
                tally["rejected", reached + 1] += 1


@attrs.frozen
class Case:
    """One drawn composition, without what depends on the target."""

    family: str
    reading: str
    dtype: torch.dtype
    vocab_size: int
    weights: int
    prompt: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_at: int | None
    drafter: str
    hit_rates: list[float]
    mistake: str
    block_size: int
    builder: str
    refiner: str
    selector: str
    budget: int
    branching: int
    children: int
    least: float


@st.composite
def cases(draw):
    vocab_size = draw(st.sampled_from([5, 40]))
    return Case(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        reading=draw(st.sampled_from(["lean", "lean", "library"])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        vocab_size=vocab_size,
        weights=draw(st.integers(0, 1)),
        prompt=draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=12)),
        max_new_tokens=draw(st.integers(1, 24)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
        seed=draw(st.integers(0, 1000)),
        stop_at=draw(st.none() | st.integers(0, 23)),
        drafter=draw(st.sampled_from(["oracle", "oracle", "oracle", "random"])),
        hit_rates=draw(st.lists(st.sampled_from([0.0, 0.8, 1.0, 1.0]), min_size=BLOCK, max_size=BLOCK)),
        mistake=draw(st.sampled_from(["random", "runner-up", "shifted", "not-a-number"])),
        block_size=draw(st.integers(2, BLOCK)),
        builder=draw(st.sampled_from(["marginal", "top-m", "frontier"])),
        refiner=draw(st.sampled_from(["none", "swiglu", "linear", "two-token", "bilinear"])),
        selector=draw(st.sampled_from(["opt-tree", "opt-tree", "chain", "cost-aware"])),
        budget=draw(st.integers(0, 24)),
        branching=draw(st.sampled_from([1, 2, 4, 100])),
        children=draw(st.sampled_from([1, 2, 5, 100])),
        least=draw(st.sampled_from([0.0, 0.0, 0.02, 0.5])),
    )


def random_dflash(target, case):
    """A drafter of random weights: hardly ever right, and never harmful."""
    sizes = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "vocab_size": target.vocab_size,
        "rope_theta": target.fingerprint().rope_theta or 10000.0,
    }
    layers = (target.num_layers - 1, 0)
    torch.manual_seed(case.seed)
    network = DFlashNetwork(Qwen3Config(**sizes), len(layers)).to(target.device, target.dtype)
    facts = DFlashFacts(sizes, case.block_size, 0, layers, None, None, None)
    columns = None
    if case.seed % 2:  # every other token
        columns = torch.arange(0, target.vocab_size, 2, device=target.device)
    return DFlash(network.requires_grad_(False), facts, columns=columns)


def random_refiner(target, case, width):
    """Any refiner with random weights, small enough to leave an oracle mostly right."""
    torch.manual_seed(case.seed)
    make = {
        "swiglu": lambda: SwiGlu(SwiGluNetwork(width, 8, 1)),
        "two-token": lambda: TwoToken(SwiGluNetwork(width, 8, 2)),
        "linear": lambda: Linear(LinearNetwork(width)),
        "bilinear": lambda: Bilinear(BilinearNetwork(width, target.vocab_size, 4), candidates=6),
    }
    refiner = make[case.refiner]()
    if case.refiner != "bilinear" and case.seed % 3 == 0:
        refiner.candidates = 6
    for tensor in refiner.network.parameters():
        torch.nn.init.normal_(tensor, std=0.1)
    refiner.network.to(target.device, target.dtype).requires_grad_(False)
    return refiner


def compose(target, case, text):
    if case.drafter == "oracle":
        rates = case.hit_rates[: case.block_size - 1]
        drafter, width = Oracle(text, rates, case.mistake, case.seed), target.vocab_size
    else:
        drafter, width = random_dflash(target, case), target.hidden_size
    refiner = NoRefiner()
    builder = {
        "marginal": Marginal(),
        "top-m": TopM(case.branching, case.children, case.least),
        "frontier": Frontier(case.children),
    }[case.builder]
    if case.refiner != "none":
        refiner = random_refiner(target, case, width)
        if case.builder == "marginal":
            builder = TopM(case.branching, case.children, case.least)
    # Passes that cost hardly more for a node, or nearly as much again; or a draft that never pays.
    costs = PassCosts([1, 25], [64], [[1.0, (1.0, 3.0, 20.0)[case.seed % 3]]])
    selector = {
        "opt-tree": OptTree(case.budget),
        "chain": Chain(case.budget),
        "cost-aware": CostAware(costs, OptTree(case.budget)),
    }[case.selector]
    return Decoder(target, drafter, builder, refiner, selector)


def check(case, device, tally):
    target = target_of(case.family, case.dtype, case.vocab_size, case.weights, case.reading, device)
    settings_of = {"temperature": case.temperature, "seed": case.seed}
    plain = reference_text(target.model, case.prompt, case.max_new_tokens, **settings_of)
    stop_ids = set() if case.stop_at is None else {plain[case.stop_at % len(plain)]}
    expected = plain
    if stop_ids:
        expected = plain[: next(index for index, token in enumerate(plain) if token in stop_ids) + 1]

    decoder = compose(target, case, [*case.prompt, *plain])
    emissions = []
    result = decoder.generate(
        case.prompt,
        max_new_tokens=case.max_new_tokens,
        stop_ids=stop_ids,
        on_emission=emissions.append,
        **settings_of,
    )

    assert list(result.token_ids) == expected
    assert result.stop_reason == ("stop_token" if expected[-1] in stop_ids else "max_new_tokens")
    steps = result.statistics.steps
    assert sum(step.num_emitted for step in steps) == len(expected) - 1
    assert all(step.num_drafted <= case.budget and step.tree_depth < case.block_size for step in steps)
    count(tally, emissions)


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_text_is_the_targets_own(case, device, tally):
    check(case, device, tally)


LONG_ROPE = {
    "original_max_position_embeddings": 24,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 24,
        "partial_rotary_factor": 1.0,
    },
}
SWEEP = Case(
    family="llama",
    reading="lean",
    dtype=torch.float32,
    vocab_size=40,
    weights=0,
    prompt=[3, 1, 4, 1, 5, 9, 2],
    max_new_tokens=32,
    temperature=0.0,
    seed=5,
    stop_at=None,
    drafter="oracle",
    hit_rates=[0.8] * BLOCK,
    mistake="runner-up",
    block_size=BLOCK,
    builder="top-m",
    refiner="swiglu",
    selector="opt-tree",
    budget=15,
    branching=4,
    children=4,
    least=0.0,
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family, dtype, temperature, device, tally):
    check(attrs.evolve(SWEEP, family=family, dtype=dtype, temperature=temperature), device, tally)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_trees_with_empty_slots(case, device, tally):
    """As on a GPU, where trees are not cut to their nodes: the same on every device."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (opt_tree, chain, tree, interfaces):
            patch.setattr(module, "trims", lambda device: False)
        patch.setattr(sdpa_tree, "chooses_on_the_way", lambda device: False)
        check(case, device, tally)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_compiled_passes(case, device, tally):
    """Graphs of one target, run as they are: what the compiler makes of them has a test of its own."""
    only = {"family": "qwen3", "dtype": torch.float64, "vocab_size": 40, "weights": 0, "reading": "compiled"}
    case = attrs.evolve(case, **only)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.compile", partial(torch.compile, backend="eager"))
        check(case, device, tally)
    compiled = target_of(*only.values(), device).compiled
    assert (compiled.failed, compiled.outdated) == (False, False)


@pytest.mark.parametrize("prompt_length", [3, 5, 8])
def test_rotary_factors_that_go_by_the_furthest_position(prompt_length, device, tally):
    """Long RoPE changes all factors past a switch: no tree may reach over it."""
    model = tiny_model("phi3", dtype=torch.float64, device=device, **LONG_ROPE)
    target = wrap_model(model)
    assert target.max_positions == 24
    prompt = list(range(1, prompt_length + 1))
    plain = reference_text(model, prompt, 24 - prompt_length)
    drafter = Oracle([*prompt, *plain, *plain], [1.0] * 7)
    decoder = Decoder(target, drafter, Marginal(), NoRefiner(), OptTree(20))
    result = decoder.generate(prompt, max_new_tokens=100)
    assert (list(result.token_ids), result.stop_reason) == (plain, "position_limit")


@pytest.mark.parametrize("selector", ["opt-tree", "chain"])
@pytest.mark.parametrize("wrong", range(1, BLOCK))
def test_wrong_at_one_depth(wrong, selector, device, tally):
    """Right down to one depth and wrong there, so that every depth is the last one accepted."""
    rates = [1.0] * (wrong - 1) + [0.0] + [1.0] * (BLOCK - wrong)
    case = attrs.evolve(SWEEP, hit_rates=rates, mistake="random", refiner="none", selector=selector)
    for family in ("llama", "gemma3", "gpt2", "cohere"):
        check(attrs.evolve(case, family=family), device, tally)
