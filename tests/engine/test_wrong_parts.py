"""Parts that do not keep to their interface: one error that names the part and what it gave."""

import attrs
import pytest
import torch

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.engine import Decoder
from treeflash.engine.step import planned
from treeflash.errors import CompositionError
from treeflash.interfaces import Refiner, Selector, TreeBuilder
from treeflash.sampling import Draws
from treeflash.testing.oracle import Oracle
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState, Limits, TargetOutput, TreeFigures

PROMPT = [2, *b"Ana has 7 apples."]


def returning(base, method, value):
    """An instance of a subclass of which one method returns a value; its arguments are those of `base`."""
    return type("Wrong", (base,), {method: lambda self, *arguments: value})


@pytest.fixture
def drafter():
    return Oracle([*PROMPT, *b" Ana gets 2 apples"], [0.9, 0.9])


def decode(target, drafter, builder=None, refiner=None, **parts):
    builder, refiner = builder or Marginal(), refiner or NoRefiner()
    Decoder(target, drafter, builder, refiner, **parts).generate(PROMPT, max_new_tokens=6)


@pytest.mark.parametrize("value", [None, [1, 2], "text", SdpaTree])
@pytest.mark.parametrize(
    ("kind", "base", "method", "wanted"),
    [
        ("builder", Marginal, "build", "a Lattice or an OnDemand"),
        ("refiner", NoRefiner, "refine", "a Proposal"),
        ("selector", Chain, "plan", "a Limits"),
        ("selector", Chain, "select", "a TokenTree"),
        ("verifier", SdpaTree, "verify", "an Acceptance"),
    ],
)
def test_a_part_that_returns_something_else_is_named(kind, base, method, wanted, value, tiny_target, drafter):
    with pytest.raises(CompositionError) as error:
        decode(tiny_target, drafter, **{kind: returning(base, method, value)()})
    assert str(error.value).startswith(f"{kind} Wrong: {method} returned ")
    assert f", expected {wanted}" in str(error.value)


@pytest.mark.parametrize("value", [None, [1, 2], (), (torch.zeros(1), [0.0]), torch.zeros(2, 1)])
@pytest.mark.parametrize("builder", [TopM(2, 2), Frontier(2)], ids=["at once", "on demand"])
def test_a_refiner_whose_children_are_no_tensors_is_named(value, builder, tiny_target, drafter):
    with pytest.raises(CompositionError, match=r"refiner Wrong: children returned .*two tensors"):
        decode(tiny_target, drafter, builder, returning(NoRefiner, "children", value)())


def test_a_drafter_that_returns_no_draft_is_named(tiny_target, models):
    target, folder = tiny_target, models / "tiny-treeflash"
    made = DFlash.from_checkpoint(folder, target)
    made.propose = lambda *arguments: [1, 2]
    with pytest.raises(CompositionError) as error:
        decode(target, made)
    wanted = "expected a BlockDraft, because its drafts_blocks is true"
    assert str(error.value) == f"drafter DFlash: propose returned a list, {wanted}"


def test_a_drafter_that_drafts_blocks_and_says_not_is_named(tiny_target, models):
    class Wrong(DFlash):
        drafts_blocks = False

    drafter = Wrong.from_checkpoint(models / "tiny-treeflash", tiny_target)
    with pytest.raises(CompositionError) as error:
        Decoder(tiny_target, drafter).generate(PROMPT, max_new_tokens=6)
    wanted = "expected a Proposal, because its drafts_blocks is false"
    assert str(error.value) == f"drafter Wrong: propose returned a BlockDraft, {wanted}"


@pytest.mark.parametrize("given", [None, "dflash", 3, OptTree, OptTree(3)])
@pytest.mark.parametrize("kind", ["drafter", "builder", "refiner", "selector", "verifier"])
def test_what_is_no_part_is_refused_when_composed(kind, given, tiny_target, drafter):
    parts = {"drafter": drafter, "builder": Marginal(), "refiner": NoRefiner(), kind: given}
    if kind == "selector" and isinstance(given, OptTree):
        return
    with pytest.raises(CompositionError, match=f"{kind}: expected "):
        Decoder(tiny_target, **parts)


class NoPlan(Selector):
    """A selector that takes what it can get."""

    def select(self, proposal, limits):
        return Chain().select(proposal, limits)


def test_a_selector_need_not_plan(tiny_target, drafter):
    limits = Limits(7, 3, 20)
    assert NoPlan().plan((), limits) is limits
    plain = Decoder(tiny_target).generate(PROMPT, max_new_tokens=8)
    decoder = Decoder(tiny_target, drafter, Marginal(), NoRefiner(), NoPlan())
    assert decoder.generate(PROMPT, max_new_tokens=8).token_ids == plain.token_ids


@attrs.frozen
class TwoAlone(TreeBuilder):
    """A builder for refiners that look at two tokens."""

    min_history = 2

    def build(self, draft, history, limits):
        assert history == 2
        return TopM(2, 2).build(draft, history, limits)


class Looks(Refiner):
    """A refiner that looks at as many tokens as it is told to."""

    def children(self, draft, slots, previous, k):
        return NoRefiner().children(draft, slots, previous, k)


@pytest.mark.parametrize("history", [0, 1, 2])
def test_a_builder_is_asked_only_for_histories_it_serves(history, tiny_target, drafter):
    refiner = type("Looks", (Looks,), {"history": history})()
    if history == 2:
        decode(tiny_target, drafter, TwoAlone(), refiner)
        return
    with pytest.raises(
        CompositionError, match=f"builder: expected contexts of {history} token.*found TwoAlone"
    ):
        decode(tiny_target, drafter, TwoAlone(), refiner)


def trees(device):
    """Two trees side by side: a fork, and a chain of one with two empty slots."""
    fork = TokenTree.from_lists([1, 5, 6, 7], [-1, 0, 0, 1], [0.0, -0.5, -1.0, -2.0])
    joined = {
        "token_ids": torch.cat([fork.token_ids, torch.tensor([[2, 8, 0, 0]])]),
        "parents": torch.cat([fork.parents, torch.tensor([[-1, 0, 3, 3]])]),
        "depths": torch.cat([fork.depths, torch.tensor([[0, 1, 9, 9]])]),
        "log_weights": torch.cat([fork.log_weights, torch.tensor([[0.0, -0.25, 7.0, torch.inf]])]),
        "num_nodes": torch.tensor([4, 2]),
    }
    return TokenTree(**{name: value.to(device) for name, value in joined.items()}, max_depth=2)


def test_an_acceptance_gathers_what_belongs_to_its_paths(device):
    tree = trees(device)
    taps = torch.arange(2 * 4 * 3, dtype=torch.float32, device=device).view(2, 4, 3)
    output = TargetOutput(torch.zeros(2, 4, 9, device=device), taps)
    found = Acceptance.of(tree, [[0, 1, 3], [0]], [[5, 7, 4], [9]], output)
    assert (found.num_drafted, found.depths, found.num_accepted) == ([3, 1], [2, 1], [2, 0])
    assert found.expected == pytest.approx(
        torch.tensor([[-0.5, -1.0, -2.0], [-0.25, -torch.inf, -torch.inf]]).exp().sum(1).tolist()
    )
    assert found.taps[0].tolist() == taps[0, [0, 1, 3]].tolist()
    assert found.taps[1, 0].tolist() == taps[1, 0].tolist()
    assert Acceptance.of(tree, [[0], [0]], [[5], [9]], TargetOutput(output.logits, None)).taps is None


def test_figures_agree_with_the_verifiers_own(tiny_target, drafter, models):
    """Those that the built-in verifier has on the host are those that are read off the tree."""
    target = tiny_target
    state = target.start(1, 64, (0, 1))
    prompt = torch.tensor([PROMPT], device=target.device)
    with torch.inference_mode():
        target.prefill(state, prompt)
        tree = TokenTree.from_lists(
            [PROMPT[-1], 65, 66, 67], [-1, 0, 0, 2], [0.0, -0.5, -1.0, -2.0], device=target.device
        )
        decoding = DecodeState(prompt[:, -2:], torch.tensor([len(PROMPT)]), state, None)
        found = SdpaTree().verify(target, decoding, tree, Draws())
    read = TreeFigures.of(tree)
    assert (found.num_drafted, found.depths) == (read.num_drafted, read.depths)
    assert found.expected == pytest.approx(read.expected, abs=1e-5)


@pytest.mark.parametrize("excess", [Limits(99, 2), Limits(3, 99)])
def test_a_plan_beyond_its_limits_is_refused(excess):
    """A node past the target's last position would turn the whole pass, and the text with it."""

    class Greedy(OptTree):
        def plan(self, steps, limits):
            return excess

    check = r"selector Greedy: plan returned \d+ levels and \d+ nodes, expected at most the 3 levels and 7"
    with pytest.raises(CompositionError, match=check):
        planned(Greedy(7), [], Limits(7, 3))


def test_a_tree_deeper_than_its_limits_is_refused(tiny_target):
    class Deep(OptTree):
        def select(self, proposal, limits):
            return TokenTree.from_lists([int(proposal.anchor), 7, 8, 9], [-1, 0, 1, 2])

    decoder = Decoder(tiny_target, Oracle([], [1.0] * 5), Marginal(), NoRefiner(), Deep(5))
    with pytest.raises(CompositionError, match="selector Deep: select returned 3 levels"):
        decoder.generate([2, 65, 66], max_new_tokens=3)


@pytest.mark.parametrize("change", [{"max_depth": 1}, {"depths": torch.tensor([[0, 1, 1]])}])
def test_a_tree_of_wrong_depths_is_refused(tiny_target, change):
    """It was read at the positions that they give, under masks that go as far as they say."""
    tree = attrs.evolve(TokenTree.from_lists([5, 6, 7], [-1, 0, 1]), **change)
    state = tiny_target.start(1, 32, ())
    tiny_target.prefill(state, torch.tensor([[2, 65, 66]]))
    decoding = DecodeState(torch.tensor([[66, 5]]), torch.tensor([3]), state, None)
    with torch.inference_mode(), pytest.raises(CompositionError, match="expected depth 2 for that node"):
        SdpaTree().verify(tiny_target, decoding, tree, Draws())
