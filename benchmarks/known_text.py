"""Targets and drafters of public shapes with random weights, whose text and accepted nodes are known.

A random target has no text that a draft could be right about, and in bfloat16 not even one that two passes
agree on. Here the embedding is loud and the output head a copy of it, so that what the layers add never
matters: the target writes its last token over and over, far ahead of what rounding could change. The parts
that draft are real; the tree that they come to is exchanged, last of all, for one of the same size with as
much of the text as is wanted.
"""

from collections.abc import Callable, Sequence
from math import floor
from typing import Any

import attrs
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from treeflash.checkpoints.dflash_layout import config_of_network, read_facts
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.components.refiners.swiglu import SwiGlu, SwiGluNetwork
from treeflash.interfaces import Selector
from treeflash.proposal import Proposal
from treeflash.statistics import StepRecord
from treeflash.target import HuggingFaceTarget, wrap_model
from treeflash.tree import TokenTree
from treeflash.types import Limits

BLOCK = 16
# Standard deviations of the embedding and of all other matrices. What 36 layers add to a token's embedding is
# about as loud, but points nowhere near another's.
_LOUD, _USUAL = 8.0, 0.02


@attrs.frozen
class Shape:
    """Sizes of a target and of the drafter that was published for it.

    Attributes:
        hidden: D.
        intermediate: Width of the SwiGLU layers of target, backbone and refiner.
        layers: Of the target.
        heads: Of queries.
        key_heads: Of keys and values.
        head_dim: Their width.
        vocabulary: Tokens.
        tied: Whether the output head is the embedding.
        taps: Target layers that the drafter reads.
        mask: The drafter's mask token.
        draft_layers: Of the backbone.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    taps: tuple[int, ...]
    mask: int
    draft_layers: int

    def config(self, layers: int) -> Qwen3Config:
        """In Qwen3's terms."""
        return Qwen3Config(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocabulary,
            tie_word_embeddings=self.tied,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )


SHAPES = {
    "tiny": Shape(64, 128, 4, 4, 2, 16, 1024, False, (0, 2), 1000, 1),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, True, (1, 9, 17, 25, 33), 151669, 5),
    "8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, False, (1, 9, 17, 25, 33), 151669, 5),
}


def make_target(shape: Shape, device: torch.device, *, lean: bool, compiled: bool) -> HuggingFaceTarget:
    """A target that repeats its last token, made where it is to run."""
    with device:
        model = AutoModelForCausalLM.from_config(shape.config(shape.layers), dtype=torch.bfloat16)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        embedding.normal_(std=_LOUD)
        if head is not embedding:
            head.copy_(embedding)
    return wrap_model(model.eval(), lean=lean, compiled=compiled)


def make_drafter(shape: Shape, target: HuggingFaceTarget) -> DFlash:
    """The backbone."""
    config, facts = shape.config(shape.draft_layers), target.fingerprint()
    told, faults = read_facts(config_of_network(config, facts, shape.taps, shape.mask, BLOCK), facts)
    if told is None or faults:
        raise ValueError(faults)
    network = _random(lambda: DFlashNetwork(config, len(shape.taps)), target)
    network.prepare_rotary()
    return DFlash(network, told)


def make_refiner(shape: Shape, target: HuggingFaceTarget) -> SwiGlu:
    """TreeFlash's refiner."""
    return SwiGlu(_random(lambda: SwiGluNetwork(shape.hidden, shape.intermediate, 1), target))


def _random(make: Callable[[], Any], target: HuggingFaceTarget) -> Any:
    """A network on the target's device in its dtype, and never elsewhere."""
    with torch.device("meta"):
        network = make().to(target.dtype)
    network = network.to_empty(device=target.device).eval()
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                weight.normal_(std=_USUAL)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return network


def emissions(tau: float, total: int) -> list[int]:
    """Tokens that each step emits until `total`: after any number of steps `tau` times that, to one token."""
    steps = int(total / tau) + 1
    return [floor((step + 1) * tau) - floor(step * tau) for step in range(steps)]


@attrs.frozen
class ToldLimits(Limits):
    """Limits of a step.

    Attributes:
        step: Its number.
    """

    step: int = 0


@attrs.frozen(eq=False)
class Told(Selector):
    """Selects in earnest, and gives the tree that was made for the step in place of what it comes to.

    Attributes:
        inner: The selector.
        trees: By step: what is verified, on the device beforehand.
    """

    inner: Selector
    trees: Sequence[TokenTree]

    @classmethod
    def of(
        cls,
        inner: Selector,
        text: Sequence[int],
        start: int,
        emitted: Sequence[int],
        nodes: int,
        target: HuggingFaceTarget,
        *,
        chain: bool,
    ) -> "Told":
        """Makes the trees.

        Args:
            inner: The selector.
            text: Prompt and continuation.
            start: Length of the prompt: where the first step's root is.
            emitted: Tokens that each step is to emit.
            nodes: Draft nodes of each tree, fewer than the vocabulary has tokens.
            target: The target.
            chain: Whether the nodes are one path.
        """
        trees = []
        for count in emitted:
            lists = _tree(text, start, count - 1, nodes, target.vocab_size, chain)
            trees.append(TokenTree.from_lists(*lists, device=target.device))
            start += count
        return cls(inner, trees)

    def plan(self, steps: Sequence[StepRecord], limits: Limits) -> ToldLimits:
        """As the selector plans."""
        planned = self.inner.plan(steps, limits)
        return ToldLimits(planned.nodes, planned.depth, planned.length, len(steps))

    def select(self, proposal: Proposal, limits: Limits) -> TokenTree:
        """There is nothing to copy to the device, and nothing to wait for."""
        assert isinstance(limits, ToldLimits)
        selected, told = self.inner.select(proposal, limits), self.trees[limits.step]
        if selected.size != told.size:
            raise RuntimeError(f"expected a tree of {told.size - 1} nodes, found {selected.size - 1}")
        # A mask is made for as many levels as the selected tree has, or may have.
        return attrs.evolve(told, max_depth=max(told.max_depth, selected.max_depth))


def _tree(
    text: Sequence[int], root: int, accepted: int, nodes: int, vocabulary: int, chain: bool
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree of which just so many nodes are the text's.

    Other nodes stand between these, as in trees that were selected, so that a commit has rows to move.
    """
    path = {1 + (step if chain else step * nodes // accepted) for step in range(accepted)}
    tokens, parents, depths, last = [text[root]], [-1], [0], 0
    for node in range(1, nodes + 1):
        parent = node - 1 if chain else last
        right = text[root + depths[parent] + 1]
        # Wrong ones below one parent differ, and none is right by accident.
        tokens.append(right if node in path else (right + node) % vocabulary)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        last = node if node in path else last
    return tokens, parents
