"""What the engine expects of a selector."""

import torch

from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.engine import Decoder
from treeflash.interfaces import Selector
from treeflash.places import locate
from treeflash.proposal import TableProposal
from treeflash.statistics import StepRecord
from treeflash.testing.contracts.contract import MODELS, Contract, check_lossless, check_options
from treeflash.types import Limits, Transitions

_STEPS = [StepRecord(5, 3, number % 3, 1 + number % 3, {}) for number in range(6)]


class SelectorContract(Contract):
    """Subclass it and say how the selector is made."""

    def make(self) -> Selector:
        """Makes the selector."""
        raise NotImplementedError

    def test_it_can_be_configured(self) -> None:
        """Options are an attrs class, and it is documented."""
        check_options(self.make())

    def test_plans_stay_within_limits(self) -> None:
        """Before the first step and later."""
        selector = self.make()
        for steps in ((), _STEPS):
            for limits in (Limits(1 << 16, 7), Limits(3, 2), Limits(0, 7), Limits(7, 0)):
                planned = selector.plan(steps, limits)
                asked = f"{limits} after {len(steps)} steps"
                assert 0 <= planned.nodes <= limits.nodes, asked
                assert 0 <= planned.depth <= limits.depth, asked

    def test_trees_are_trees_within_limits(self) -> None:
        """Rooted at the anchor, parents before children, by falling weight, no sibling twice."""
        selector = self.make()
        for seed in range(20):
            proposal = _proposal(seed)
            for limits in (Limits(1, 1), Limits(4, 2), Limits(9, 5), Limits(200, 5)):
                planned = selector.plan((), limits)
                if not planned.allow_drafting:
                    continue
                tree = selector.select(proposal, planned)
                asked = f"seed {seed}, {limits}"
                tree.validate()
                assert tree.token_ids[:, 0].tolist() == proposal.anchor.tolist(), asked
                assert int(tree.num_nodes.max()) <= planned.nodes + 1, asked
                depths = tree.depths.masked_fill(~tree.is_node, 0)
                assert int(depths.max()) <= planned.depth, asked

    def test_the_text_is_the_targets_own(self) -> None:
        """Whatever it chooses."""
        target = self.target()
        refiner = SwiGlu.from_checkpoint(locate(f"{MODELS}/tiny-treeflash"), target)
        check_lossless(Decoder(target, self.trained_drafter(target), TopM(4, 4), refiner, self.make()))


def _proposal(seed: int) -> TableProposal:
    """A random table: five depths of three contexts with four children each, some of them none."""
    random = torch.Generator().manual_seed(seed)
    shape = (1, 5, 3, 4)
    ids = torch.rand(*shape[:-1], 30, generator=random).argsort(dim=-1)[..., :4]
    log_probs = (torch.randn(shape, generator=random) * 2).log_softmax(dim=-1).sort(descending=True).values
    log_probs = log_probs.masked_fill(torch.rand(shape, generator=random) < 0.1, -torch.inf)
    following = torch.randint(-1, 3, shape, generator=random)
    following[:, -1] = -1
    return TableProposal(torch.tensor([7]), Transitions(ids, log_probs, following))
