"""The built-in components keep the contracts that plugins are held to."""

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


def wrong(contract, name, **methods):
    broken = type("Broken", (contract,), methods)()
    with pytest.raises(AssertionError):
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
