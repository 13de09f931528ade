"""Each refiner against its formula, written out for one context at a time over the whole vocabulary."""

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from treeflash.components.refiners import trained
from treeflash.components.refiners.bilinear import Bilinear, BilinearNetwork
from treeflash.components.refiners.linear import Linear, LinearNetwork
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu, SwiGluNetwork
from treeflash.components.refiners.two_token import TwoToken
from treeflash.types import BlockDraft, DraftHead

BATCH, DEPTH, HIDDEN, WIDTH, RANK = 2, 4, 12, 10, 5
# The head is padded: rows past the vocabulary are no tokens.
VOCABULARY, HEAD_ROWS = 29, 32
EPS = 1e-6
REFINERS = {
    "swiglu": (SwiGlu, lambda: SwiGluNetwork(HIDDEN, WIDTH, 1)),
    "two-token": (TwoToken, lambda: SwiGluNetwork(HIDDEN, WIDTH, 2)),
    "linear": (Linear, lambda: LinearNetwork(HIDDEN)),
    "bilinear": (Bilinear, lambda: BilinearNetwork(HIDDEN, VOCABULARY, RANK)),
}
HIDDEN_REFINERS = [name for name in REFINERS if name != "bilinear"]
# Probabilities come as float32, whatever the weights are.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 2e-6}


class Doubled(nn.Module):
    """Stands in a map's place."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, states):
        return 2 * self.part(states)


@attrs.frozen(eq=False)
class Model:
    """A drafter's own tables, as the formulas name them."""

    embedding: Tensor
    head: Tensor
    norm: Tensor
    temperature: float


def randomise(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Every weight random, those that start at zero included."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.requires_grad_(False)


def rms_norm(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.pow(2).mean() + EPS).sqrt() * weight


def make(name: str, dtype: torch.dtype, device: str, temperature: float = 1.0, zero: str | None = None):
    """A refiner with random weights, a random draft, and the tables behind it."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype=dtype, device=device)

    model = Model(
        random(VOCABULARY, HIDDEN), random(HEAD_ROWS, HIDDEN), 1 + 0.3 * random(HIDDEN), temperature
    )
    norm = nn.RMSNorm(HIDDEN, eps=EPS, dtype=dtype, device=device)
    norm.weight = nn.Parameter(model.norm, requires_grad=False)
    head = DraftHead(
        embed=lambda ids: functional.embedding(ids, model.embedding),
        norm=norm,
        project=lambda normed: normed @ model.head.T,
        vocab_size=VOCABULARY,
        temperature=temperature,
    )
    hidden = 2 * random(BATCH, DEPTH, HIDDEN)
    recent = torch.randint(VOCABULARY, (BATCH, 2), generator=generator).to(device)
    draft = BlockDraft(recent, hidden, norm(hidden), head)
    component, network = REFINERS[name]
    weights = randomise(network(), generator).to(dtype=dtype, device=device)
    if zero is not None:
        nn.init.zeros_(weights.get_submodule(zero).weight)
    return component(weights), draft, model


def contexts(history: int, device: str) -> tuple[Tensor, Tensor]:
    """Slots out of order and repeated, each with tokens before it."""
    generator = torch.Generator().manual_seed(1)
    slots = torch.tensor([0, 3, 1, 1, 2, 3, 0, 1, 2], device=device)
    previous = torch.randint(VOCABULARY, (BATCH, len(slots), history), generator=generator)
    return slots, previous.to(device)


def literal(name: str, network: nn.Module, hidden: Tensor, previous: Tensor, model: Model) -> Tensor:
    """Log-probabilities `[V]` of one position with hidden state `[D]` behind tokens `[H]`."""
    weights = {key: tensor.double() for key, tensor in network.state_dict().items()}
    embedding, head, norm = model.embedding.double(), model.head.double(), model.norm.double()
    hidden = hidden.double()
    normed = rms_norm(hidden, norm)
    if name == "bilinear":
        code = weights["predecessor.weight"][previous[0]] * (
            weights["projection.weight"] @ normed + weights["projection.bias"]
        )
        logits = (head @ normed)[:VOCABULARY] + weights["successor.weight"] @ code
        return torch.log_softmax(logits / model.temperature, dim=0)
    seen = [rms_norm(embedding[token], weights["norm.weight"]) for token in previous]
    inputs = torch.cat([*seen, normed])
    if name == "linear":
        correction = weights["linear.weight"] @ inputs
    else:
        both = weights["ug.weight"] @ inputs + weights["ug.bias"]
        up, gate = both[:WIDTH], both[WIDTH:]
        correction = weights["d.weight"] @ (gate * torch.sigmoid(gate) * up)
    logits = (head @ rms_norm(hidden + correction, norm))[:VOCABULARY]
    return torch.log_softmax(logits / model.temperature, dim=0)


def literals(name, refiner, draft, slots, previous, model) -> Tensor:
    """`[B, F, V]`."""
    rows = [
        [
            literal(name, refiner.network, draft.hidden[row, slot], previous[row, at], model)
            for at, slot in enumerate(slots.tolist())
        ]
        for row in range(BATCH)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def assert_best(found: tuple[Tensor, Tensor], expected: Tensor, k: int, tolerance: float) -> None:
    """That ids and log-probabilities are the `k` best of `[B, F, V]`, ties in any order."""
    ids, log_probs = found
    assert ids.dtype == torch.int64
    assert log_probs.dtype == torch.float32
    best = expected.topk(k, dim=-1).values
    torch.testing.assert_close(log_probs.double(), best, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(expected.gather(2, ids), best, atol=tolerance, rtol=tolerance)
    assert all(len(set(row)) == k for row in ids.flatten(0, 1).tolist())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", HIDDEN_REFINERS)
def test_hidden_refiners_follow_their_formula(name, temperature, dtype, device):
    refiner, draft, model = make(name, dtype, device, temperature)
    slots, previous = contexts(refiner.history, device)
    expected = literals(name, refiner, draft, slots, previous, model)
    for k in (1, 6, VOCABULARY):
        assert_best(refiner.children(draft, slots, previous, k), expected, k, TOLERANCE[dtype])


@pytest.mark.parametrize("change", ["hook", "adapter"])
@pytest.mark.parametrize("name", HIDDEN_REFINERS)
def test_a_map_that_is_more_than_a_map_is_called(name, change, device):
    """With an output of its own doubled, by a hook or by what stands in its place."""
    refiner, draft, _ = make(name, torch.float64, device)
    slots, previous = contexts(refiner.history, device)
    place = "linear" if name == "linear" else "ug"
    part = getattr(refiner.network, place)
    doubled, _, _ = make(name, torch.float64, device)
    for weight in getattr(doubled.network, place).parameters():
        weight.mul_(2)
    if change == "hook":
        part.register_forward_hook(lambda module, inputs, output: 2 * output)
    else:
        setattr(refiner.network, place, Doubled(part))
    expected = doubled.children(draft, slots, previous, 6)
    for found, wanted in zip(refiner.children(draft, slots, previous, 6), expected, strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("candidates", [VOCABULARY, 1000])
def test_bilinear_over_the_whole_vocabulary_is_the_softmax(candidates, dtype, device):
    refiner, draft, model = make("bilinear", dtype, device)
    refiner.candidates = candidates
    slots, previous = contexts(1, device)
    expected = literals("bilinear", refiner, draft, slots, previous, model)
    for k in (1, 6, VOCABULARY):
        assert_best(refiner.children(draft, slots, previous, k), expected, k, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("candidates", [1, 4, 20])
def test_bilinear_candidates_and_the_rest_share_the_whole(candidates, dtype, device):
    # The candidates' mass is scored anew, the others keep theirs; one normaliser serves both.
    refiner, draft, model = make("bilinear", dtype, device)
    refiner.candidates = candidates
    slots, previous = contexts(1, device)
    ids, log_probs = refiner.children(draft, slots, previous, candidates)
    network, none = refiner.network.double(), NoRefiner()
    all_ids, all_log_probs = none.children(draft, slots, previous[..., :0], VOCABULARY)
    for row in range(BATCH):
        for at, slot in enumerate(slots.tolist()):
            marginal = torch.zeros(VOCABULARY, dtype=torch.float64, device=device)
            marginal[all_ids[row, at]] = all_log_probs[row, at].double().exp()
            kept = marginal.topk(candidates).indices
            normed = rms_norm(draft.hidden[row, slot].double(), model.norm.double())
            code = network.predecessor.weight[previous[row, at, 0]] * network.projection(normed)
            mass = marginal.clone()
            mass[kept] *= (network.successor.weight[kept] @ code).exp()
            refined = mass / mass.sum()
            others = 1 - refined[kept].sum()
            found = torch.zeros_like(refined)
            found[ids[row, at]] = log_probs[row, at].double().exp()
            assert set(ids[row, at].tolist()) == set(kept.tolist())
            torch.testing.assert_close(found[kept], refined[kept], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found.sum() + others, torch.ones_like(others), atol=1e-5, rtol=0)


def test_bilinear_looks_at_as_many_candidates_as_children_are_wanted(device):
    refiner, draft, model = make("bilinear", torch.float64, device)
    refiner.candidates = 2
    slots, previous = contexts(1, device)
    expected = literals("bilinear", refiner, draft, slots, previous, model)
    assert_best(refiner.children(draft, slots, previous, VOCABULARY), expected, VOCABULARY, 2e-6)


@pytest.mark.parametrize("name", REFINERS)
def test_more_children_than_tokens_gives_the_vocabulary(name, device):
    refiner, draft, _ = make(name, torch.float32, device)
    slots, previous = contexts(refiner.history, device)
    ids, log_probs = refiner.children(draft, slots, previous, 1000)
    assert ids.shape == (BATCH, len(slots), VOCABULARY)
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones_like(log_probs[..., 0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "zero"),
    [("swiglu", "d"), ("two-token", "d"), ("linear", "linear"), ("bilinear", "successor")],
)
@pytest.mark.parametrize("candidates", [3, 1000])
def test_a_refiner_of_zeros_changes_nothing(name, zero, candidates, device):
    refiner, draft, _ = make(name, torch.float64, device, zero=zero)
    if name == "bilinear":
        refiner.candidates = candidates
    slots, previous = contexts(refiner.history, device)
    for k in (1, 6):
        ids, log_probs = refiner.children(draft, slots, previous, k)
        expected_ids, expected = NoRefiner().children(draft, slots, previous[..., :0], k)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", REFINERS)
def test_fresh_networks_start_at_zero(name):
    # What is trained from here starts as the backbone alone.
    _, network = REFINERS[name]
    made = network()
    made.reset(torch.Generator().manual_seed(0))
    state = made.state_dict()
    last = {"swiglu": "d.weight", "two-token": "d.weight", "linear": "linear.weight"}
    assert not state[last.get(name, "successor.weight")].any()


def test_the_order_of_two_tokens_matters(device):
    # So that the formula above tells the older from the newer.
    refiner, draft, model = make("two-token", torch.float64, device)
    slots, previous = contexts(2, device)
    swapped = literals("two-token", refiner, draft, slots, previous.flip(-1), model)
    best = swapped.topk(1, dim=-1).values
    _, log_probs = refiner.children(draft, slots, previous, 1)
    assert (log_probs.double() - best).abs().max() > 0.1


def test_the_draft_temperature_divides_bilinear_scores_too(device):
    refiner, draft, model = make("bilinear", torch.float64, device, temperature=2.0)
    refiner.candidates = VOCABULARY
    slots, previous = contexts(1, device)
    expected = literals("bilinear", refiner, draft, slots, previous, model)
    assert_best(refiner.children(draft, slots, previous, 6), expected, 6, 2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_bilinear_scores_that_are_all_low_change_nothing(dtype, device):
    # Only differences of scores matter when every token is a candidate.
    refiner, draft, _ = make("bilinear", dtype, device)
    refiner.candidates = VOCABULARY
    network = refiner.network
    nn.init.ones_(network.predecessor.weight)
    nn.init.zeros_(network.projection.weight)
    nn.init.ones_(network.projection.bias)
    nn.init.constant_(network.successor.weight, -20 / RANK)
    slots, previous = contexts(1, device)
    _, log_probs = refiner.children(draft, slots, previous, 6)
    _, expected = NoRefiner().children(draft, slots, previous[..., :0], 6)
    torch.testing.assert_close(log_probs, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dense", [False, True], ids=["by position", "in one product"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["swiglu", "linear", "two-token"])
def test_candidates_alone_are_scored_anew(name, biased, temperature, dense, device, monkeypatch):
    """Each position's likeliest tokens share what they have together; the others keep what they have."""
    refiner, draft, model = make(name, torch.float64, device, temperature)
    bias = torch.linspace(-2, 2, HEAD_ROWS, dtype=torch.float64, device=device) if biased else None
    head = attrs.evolve(
        draft.head,
        project=lambda normed: functional.linear(normed, model.head, bias),
        rows=lambda ids: (model.head[ids], None if bias is None else bias[ids]),
    )
    draft, refiner.candidates = attrs.evolve(draft, head=head), 5
    if dense:
        monkeypatch.setattr(trained, "_goes_by_position", lambda states: False)
    slots, previous = contexts(refiner.history, device)
    ids, log_probs = refiner.children(draft, slots, previous, 3)
    candidates, marginals = draft.top_k(5)
    for row in range(BATCH):
        for index, slot in enumerate(slots.tolist()):
            hidden, before = draft.hidden[row, slot], previous[row, index]
            # Over all tokens, as if the head had no bias but this one.
            whole = literal(name, refiner.network, hidden, before, model)
            if bias is not None:
                whole = (whole + bias[:VOCABULARY].double() / temperature).log_softmax(0)
            among = candidates[row, slot]
            mass = marginals[row, slot].exp().sum()
            expected = whole[among].log_softmax(0) + mass.double().log()
            best = expected.topk(3)
            assert among[best.indices].tolist() == ids[row, index].tolist()
            torch.testing.assert_close(log_probs[row, index].double(), best.values, rtol=1e-5, atol=1e-5)


def test_as_many_candidates_as_tokens_are_all_of_them(device):
    refiner, draft, model = make("swiglu", torch.float64, device)
    slots, previous = contexts(1, device)
    draft = attrs.evolve(draft, head=attrs.evolve(draft.head, rows=lambda ids: (model.head[ids], None)))
    expected = refiner.children(draft, slots, previous, 4)
    refiner.candidates = VOCABULARY
    found = refiner.children(draft, slots, previous, 4)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    # No fewer than children wanted.
    refiner.candidates = 1
    assert refiner.children(draft, slots, previous, 4)[0].shape[-1] == 4


def test_a_head_without_rows_scores_all_tokens(device):
    refiner, draft, _ = make("swiglu", torch.float64, device)
    slots, previous = contexts(1, device)
    expected = refiner.children(draft, slots, previous, 4)
    refiner.candidates = 5
    assert torch.equal(refiner.children(draft, slots, previous, 4)[1], expected[1])
