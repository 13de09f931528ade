"""The built-in components keep the contracts that plugins are held to."""

import unittest

import attrs
import pytest
import torch

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.drafters.draft_model import DraftModel
from treeflash.components.drafters.none import NoDrafter
from treeflash.components.losses.cross_entropy import CrossEntropy
from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.components.losses.total_variation import TotalVariation
from treeflash.components.refiners.bilinear import Bilinear
from treeflash.components.refiners.linear import Linear
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.trainables.dflash import DFlashTrainable, DFlashTrainingOptions
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.places import locate
from treeflash.testing.contracts import (
    BuilderContract,
    DrafterContract,
    LossContract,
    RefinerContract,
    SelectorContract,
    TrainableContract,
    VerifierContract,
)
from treeflash.testing.lenient import Lenient
from treeflash.types import BlockDraft


class TestDFlash(DrafterContract):
    def make(self, target):
        return DFlash.from_checkpoint(locate("treeflash.testing:models/tiny-treeflash"), target)


class TestDraftModel(DrafterContract):
    def make(self, target):
        # The target itself is the only language model with its tokenizer at hand.
        return DraftModel(target, depth=3, children=4)


class TestNoDrafter(DrafterContract):
    def make(self, target):
        return NoDrafter()


class TestTopM(BuilderContract):
    def make(self):
        return TopM(4, 4)


class TestMarginal(BuilderContract):
    def make(self):
        return Marginal()


class TestFrontier(BuilderContract):
    def make(self):
        return Frontier(4)


class TestNoRefiner(RefinerContract):
    def make(self, target):
        return NoRefiner()


class TestTrainedSwiGlu(RefinerContract):
    def make(self, target):
        return SwiGlu.from_checkpoint(locate("treeflash.testing:models/tiny-treeflash"), target)


class Shaken(RefinerContract):
    """A refiner with weights at random."""

    kind = SwiGlu

    def make(self, target):
        random = torch.Generator().manual_seed(0)
        refiner = self.kind.fresh(self.kind.TrainingOptions(), target, 32, random)
        for weight in refiner.network.parameters():
            weight.data.copy_(torch.empty(weight.shape).normal_(std=0.2, generator=random))
        return refiner


class TestSwiGlu(Shaken):
    kind = SwiGlu


class TestTwoToken(Shaken):
    kind = TwoToken


class TestLinear(Shaken):
    kind = Linear


class TestBilinear(Shaken):
    kind = Bilinear


del Shaken


class TestOptTree(SelectorContract):
    def make(self):
        return OptTree(9)


class TestNarrowOptTree(SelectorContract):
    def make(self):
        return OptTree(20, depth=3, beam=2)


class TestChain(SelectorContract):
    def make(self):
        return Chain()


class TestLenient(VerifierContract):
    """Lossy on purpose: the tests of exact text are skipped."""

    def make(self):
        return Lenient()


class TestSdpaTree(VerifierContract):
    def make(self):
        return SdpaTree()


class TestForwardKl(LossContract):
    def make(self):
        return ForwardKl()


class TestCrossEntropy(LossContract):
    def make(self):
        return CrossEntropy()


class TestTotalVariation(LossContract):
    def make(self):
        return TotalVariation()


class TestDFlashTrainable(TrainableContract):
    def make(self, context):
        options = DFlashTrainingOptions(
            layers=1, block_size=5, target_layer_ids=[1, 3], mask_token_id=1, anchors=8, intermediate_size=32
        )
        return DFlashTrainable.from_options(options, context)


class TestTreeFlashTrainable(TrainableContract):
    def make(self, context):
        options = DFlashTrainingOptions(checkpoint="treeflash.testing:models/tiny-dflash", anchors=8)
        with_refiner = attrs.evolve(context, refiner=SwiGlu, refiner_options=SwiGlu.TrainingOptions())
        return DFlashTrainable.from_options(options, with_refiner)


def wrong(contract, name, said=None, **methods):
    broken = type("Broken", (contract,), methods)()
    with pytest.raises(AssertionError, match=said):
        getattr(broken, name)()


def test_a_selector_of_too_much_is_found():
    class Greedy(OptTree):
        def plan(self, steps, limits):
            return attrs.evolve(limits, nodes=limits.nodes + 1)

    wrong(SelectorContract, "test_plans_stay_within_limits", make=lambda self: Greedy(9))


def test_a_drafter_that_forgets_nothing_is_found():
    class Stubborn(DFlash):
        def rewind(self, state, lengths):
            pass

    def make(self, target):
        return Stubborn.from_checkpoint(locate("treeflash.testing:models/tiny-treeflash"), target)

    wrong(DrafterContract, "test_what_is_rewound_is_forgotten", make=make)


def test_a_drafter_that_takes_all_rows_for_the_longest_is_found():
    class Longest(DFlash):
        def extend(self, state, token_ids, taps, counts):
            super().extend(state, token_ids, taps, torch.full_like(counts, counts.max()))

    def make(self, target):
        return Longest.from_checkpoint(locate("treeflash.testing:models/tiny-treeflash"), target)

    wrong(DrafterContract, "test_rows_of_a_batch_may_differ_in_length", make=make)


@pytest.mark.parametrize(
    "name",
    ["test_the_text_is_the_targets_own", "test_it_accepts_the_longest_path_that_the_target_writes"],
)
def test_a_verifier_is_excused_only_if_it_says_that_it_is_lossy(name):
    class Silent(Lenient):
        lossless = True

    wrong(VerifierContract, name, make=lambda self: Silent())
    case = type("Case", (VerifierContract,), {"make": lambda self: Lenient()})()
    with pytest.raises(unittest.SkipTest, match="lossy on purpose"):
        getattr(case, name)()


def test_a_verifier_that_accepts_too_much_is_found():
    class Trusting(SdpaTree):
        def verify(self, target, state, tree, draws):
            found = super().verify(target, state, tree, draws)
            return attrs.evolve(found, tokens=[[*row[:-1], (row[-1] + 1) % 128] for row in found.tokens])

    wrong(VerifierContract, "test_the_text_is_the_targets_own", make=lambda self: Trusting())


def test_a_refiner_that_mixes_contexts_up_is_found():
    class Mixed(SwiGlu):
        def children(self, draft, slots, previous, k):
            return super().children(draft, slots, previous.roll(1, dims=1), k)

    def make(self, target):
        return Mixed.from_checkpoint(locate("treeflash.testing:models/tiny-treeflash"), target)

    wrong(RefinerContract, "test_contexts_do_not_know_each_other", make=make)


def test_options_that_nothing_is_built_from_are_found():
    class Unbuilt(OptTree):
        Options = DFlashTrainingOptions

    wrong(SelectorContract, "test_it_can_be_configured", make=lambda self: Unbuilt(9))


def shaken(kind):
    def make(self, target):
        random = torch.Generator().manual_seed(0)
        refiner = kind.fresh(kind.TrainingOptions(), target, 32, random)
        for weight in refiner.network.parameters():
            weight.data.copy_(torch.empty(weight.shape).normal_(std=0.2, generator=random))
        return refiner

    return make


def drafted(draft, **changes):
    """A draft with other fields than it has."""
    fields = {name: getattr(draft, name) for name in ("recent", "hidden", "normed", "head")}
    return BlockDraft(**{**fields, **changes})


class ReadsTheNormedState(SwiGlu):
    def children(self, draft, slots, previous, k):
        return super().children(drafted(draft, hidden=draft.normed), slots, previous, k)


class ForgetsTheTemperature(SwiGlu):
    def children(self, draft, slots, previous, k):
        head = attrs.evolve(draft.head, temperature=1.0)
        return super().children(drafted(draft, head=head), slots, previous, k)


class GivesColumnsForTokens(SwiGlu):
    def children(self, draft, slots, previous, k):
        ids, log_probs = super().children(draft, slots, previous, k)
        return draft.head.index(ids), log_probs


class CorrectsTheNextPosition(SwiGlu):
    def children(self, draft, slots, previous, k):
        return super().children(draft, (slots + 1).clamp(max=draft.depth - 1), previous, k)


class TurnsTheHistoryRound(TwoToken):
    def children(self, draft, slots, previous, k):
        return super().children(draft, slots, previous.flip(-1), k)


class IgnoresTheTokenBefore(Linear):
    def children(self, draft, slots, previous, k):
        return super().children(draft, slots, torch.full_like(previous, 65), k)


class LosesTheNormaliser(Bilinear):
    def children(self, draft, slots, previous, k):
        ids, log_probs = super().children(draft, slots, previous, k)
        return ids, log_probs - 0.05


@pytest.mark.parametrize(
    "kind",
    [
        ReadsTheNormedState,
        ForgetsTheTemperature,
        GivesColumnsForTokens,
        CorrectsTheNextPosition,
        TurnsTheHistoryRound,
        IgnoresTheTokenBefore,
        LosesTheNormaliser,
    ],
)
def test_a_refiner_that_decodes_as_it_was_not_trained_is_found(kind):
    wrong(RefinerContract, "test_children_are_what_training_computes", "training computes", make=shaken(kind))


@pytest.mark.parametrize("change", [torch.zeros_like, lambda states: states.roll(1, dims=1)])
def test_a_verifier_with_other_states_is_found(change):
    class Careless(SdpaTree):
        def verify(self, *args):
            found = super().verify(*args)
            return attrs.evolve(found, taps=change(found.taps))

    wrong(
        VerifierContract,
        "test_it_accepts_a_path_of_the_tree",
        "states of the accepted path",
        make=lambda self: Careless(),
    )


def test_a_builder_that_takes_contexts_from_the_depth_below_is_found():
    class Below(TopM):
        def build(self, draft, history, limits):
            lattice = super().build(draft, history, limits)
            contexts = lattice.contexts.clone()
            contexts[:, 1:-1] = lattice.contexts[:, 2:]
            return attrs.evolve(lattice, contexts=contexts)

    said = "history 1, depth 2"
    wrong(BuilderContract, "test_contexts_come_from_the_depth_above", said, make=lambda self: Below(4, 4))


class ReadsOnePositionLate(DFlashTrainable):
    def _draft(self, read, blocks):
        return super()._draft(attrs.evolve(read, taps=read.taps.roll(-1, dims=0)), blocks)


class RefinesAfterTheLabel(DFlashTrainable):
    def _histories(self, text, rows):
        return text.token_ids[rows[:, 1:]][..., None]


class WritesOtherWeights(DFlashTrainable):
    def write(self, folder):
        with torch.no_grad():
            self.network.hidden_norm.weight.zero_()
        return super().write(folder)


class LearnsAnotherPosition(DFlashTrainable):
    def forward(self, task, read):
        return super().forward(task, attrs.evolve(read, normed=read.normed.roll(-1, dims=0)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ReadsOnePositionLate, "training and decoding do not compute the same"),
        (RefinesAfterTheLabel, "training and decoding do not compute the same"),
        (WritesOtherWeights, "training and decoding do not compute the same"),
        (LearnsAnotherPosition, "a perfect drafter would"),
    ],
)
def test_a_trainable_that_learns_something_else_than_it_drafts_is_found(kind, said):
    def make(self, context):
        options = DFlashTrainingOptions(
            layers=1, block_size=4, target_layer_ids=[1, 3], mask_token_id=1, anchors=8, intermediate_size=32
        )
        refined = attrs.evolve(context, refiner=SwiGlu, refiner_options=SwiGlu.TrainingOptions())
        return kind.from_options(options, refined if kind is RefinesAfterTheLabel else context)

    wrong(TrainableContract, "test_what_it_learns_it_drafts", said, make=make, overfit_steps=60)


def test_assertions_of_contracts_show_values():
    class Sparse(OptTree):
        def plan(self, steps, limits):
            return attrs.evolve(limits, nodes=-3)

    with pytest.raises(AssertionError, match=r"(?s)0 <= -3"):
        type(
            "Broken", (SelectorContract,), {"make": lambda self: Sparse(9)}
        )().test_plans_stay_within_limits()
