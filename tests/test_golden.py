"""Number by number against outputs of the authors' inference code on the tiny models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.proposal import TableProposal
from treeflash.tree import TokenTree
from treeflash.types import Limits

GOLDEN = Path(__file__).parent / "golden"
REFERENCE = json.loads((GOLDEN / "reference.json").read_text())
TABLES = load_file(GOLDEN / "tables.safetensors")
SETTINGS = {"M4K8B15": (TopM(4, 8), OptTree(15)), "M16K16B31": (TopM(16, 16), OptTree(31))}


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def close(found, expected):
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=0)


@pytest.fixture
def dflash(tiny_target, models):
    return DFlash.from_checkpoint(models / "tiny-treeflash", tiny_target)


@pytest.fixture
def swiglu(tiny_target, models):
    return SwiGlu.from_checkpoint(models / "tiny-treeflash", tiny_target)


@pytest.fixture(params=REFERENCE["table_cases"], ids=lambda case: f"case{case['case']}")
def drafted(request, tiny_target, dflash):
    """A case's name, the target's taps of its context, and the draft behind its anchor."""
    case = request.param
    context = torch.tensor([case["context"]], device=tiny_target.device)
    dflash.bind(tiny_target)
    state = tiny_target.start(1, context.shape[1], dflash.tap_layers)
    taps = tiny_target.prefill(state, context).taps
    memory = dflash.start(1, context.shape[1] + 8)
    dflash.extend(memory, context, taps, torch.tensor([context.shape[1]]))
    recent = torch.tensor([[case["context"][-1], case["anchor"]]], device=tiny_target.device)
    draft = dflash.propose(memory, recent, Limits(nodes=31, depth=7))
    return f"case{case['case']}", taps, draft


def test_backbone(drafted):
    name, taps, draft = drafted
    close(taps[0], TABLES[f"{name}.context_features"])
    # The stored block has the anchor's slot in front.
    close(draft.hidden[0], TABLES[f"{name}.hidden"][1:])
    close(draft.normed[0], TABLES[f"{name}.normed"][1:])
    close(draft.head.logits(draft.normed)[0], TABLES[f"{name}.marginal_logits"][1:])


@pytest.mark.parametrize("setting", SETTINGS)
def test_transitions_and_tree(drafted, swiglu, setting):
    name, _, draft = drafted
    builder, selector = SETTINGS[setting]
    limits = Limits(nodes=selector.budget, depth=7)
    proposal = swiglu.refine(draft, builder.build(draft, 1, limits))
    tree = selector.select(proposal, limits)
    assert isinstance(proposal, TableProposal)
    stored = {part: TABLES[f"{name}.{setting}.{part}"] for part in ("token_ids", "log_probs", "next_context")}
    assert torch.equal(proposal.transitions.token_ids[0].cpu(), stored["token_ids"].long())
    close(proposal.transitions.log_probs[0], stored["log_probs"])
    assert torch.equal(proposal.transitions.next_context[0].cpu(), stored["next_context"].long())

    tree.validate()
    reference = {part: TABLES[f"{name}.{setting}.tree.{part}"].tolist() for part in ("token_ids", "parents")}
    expected = TokenTree.from_lists(reference["token_ids"], reference["parents"])
    assert set(tree.paths()) == set(expected.paths())
    assert tree.token_ids[0, 0] == expected.token_ids[0, 0]


MODES = {
    "plain": None,
    "dflash-chain": (Marginal(), False, Chain()),
    "ddtree-15": (Marginal(), False, OptTree(15)),
    "ddtree-31": (Marginal(), False, OptTree(31)),
    "treeflash-15": (TopM(16, 16), True, OptTree(15)),
    "treeflash-31": (TopM(16, 16), True, OptTree(31)),
    "treeflash-15-m4k8": (TopM(4, 8), True, OptTree(15)),
}


def decoder_of(mode, target, dflash, swiglu):
    if MODES[mode] is None:
        return Decoder(target)
    builder, refined, selector = MODES[mode]
    return Decoder(target, dflash, builder, swiglu if refined else NoRefiner(), selector)


@pytest.mark.parametrize("mode", MODES)
def test_generations_and_emitted_counts(mode, tiny_target, dflash, swiglu):
    decoder = decoder_of(mode, tiny_target, dflash, swiglu)
    for stored in (run for run in REFERENCE["generations"] if run["mode"] == mode):
        expected = stored["new_tokens"]
        # The reference drafts on as if there were no limit, and clips its last step. Here the last
        # steps draft less, so that it takes a later limit to draft alike.
        result = decoder.generate(
            REFERENCE["prompts"][stored["prompt"]], max_new_tokens=len(expected) + 8, stop_ids=()
        )
        assert list(result.token_ids[: len(expected)]) == expected
        if mode != "plain":
            emitted = [step.num_emitted for step in result.statistics.steps]
            assert clipped(emitted, len(expected) - 1) == stored["emitted_per_step"]


def clipped(emitted, total):
    counts = []
    for count in emitted:
        if total > 0:
            counts.append(min(count, total))
            total -= count
    return counts


def test_frontier_form_with_all_tokens_as_contexts_agrees(drafted, swiglu):
    """With every token a context, what is refined on demand is what is refined beforehand."""
    _, _, draft = drafted
    limits, vocabulary = Limits(nodes=31, depth=7), draft.head.vocab_size
    trees = [
        OptTree(31).select(swiglu.refine(draft, builder.build(draft, 1, limits)), limits)
        for builder in (TopM(vocabulary, 16), Frontier(16))
    ]
    table, frontier = trees
    assert set(table.paths()) == set(frontier.paths())
    torch.testing.assert_close(table.log_weights, frontier.log_weights, atol=1e-4, rtol=0)
