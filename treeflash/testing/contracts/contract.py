"""What all contracts share: the tiny target, texts, and the check that the target's text comes out."""

import inspect
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from treeflash.components.builders.marginal import Marginal
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.interfaces import Component
from treeflash.places import locate
from treeflash.proposal import Proposal
from treeflash.target import HuggingFaceTarget, load_target
from treeflash.testing.reference import reference_text
from treeflash.types import BlockDraft, Limits

MODELS = "treeflash.testing:models"
PROMPTS: Sequence[Sequence[int]] = ([2, *b"Ana has 7 apples. Ana"], [2, *b"Ben"])
NEW_TOKENS = 24


class Contract:
    """Base of the contracts.

    Attributes:
        dtype: Of the tiny target.
        device: Where it is.
    """

    dtype = "float32"
    device = "cpu"

    def target(self) -> HuggingFaceTarget:
        """The tiny target: characters are tokens, 2 begins a text and a newline ends it."""
        return load_target(locate(f"{MODELS}/tiny-target"), dtype=self.dtype, device=self.device)

    def trained_drafter(self, target: HuggingFaceTarget) -> DFlash:
        """A drafter of blocks that is often right."""
        drafter = DFlash.from_checkpoint(locate(f"{MODELS}/tiny-treeflash"), target)
        drafter.bind(target)
        return drafter

    def block_draft(self, target: HuggingFaceTarget) -> BlockDraft:
        """What that drafter drafts behind the first of the prompts."""
        drafter, text = self.trained_drafter(target), PROMPTS[0]
        state = drafter.start(1, 64)
        taps = read(target, text[:-1], drafter.tap_layers)
        ids = torch.tensor([list(text)], device=target.device)
        drafter.extend(state, ids[:, :-1], taps, torch.tensor([len(text) - 1]))
        return drafter.propose(state, ids[:, -2:], Limits(8, drafter.max_depth))


def check_options(component: Any) -> None:
    """Makes sure that a recipe could configure a component.

    Args:
        component: The component.
    """
    kind = type(component)
    options = kind.options_class()
    assert attrs.has(options), (
        f"{kind.__name__}: expected an attrs class for options, found {options.__name__}"
    )
    if options is not kind:
        inherited = kind.from_options.__func__ is Component.from_options.__func__  # type: ignore[attr-defined]
        assert not inherited, f"{kind.__name__} has Options but no from_options to build from them"
    assert inspect.getdoc(kind), f"{kind.__name__} has no documentation"


def check_lossless(decoder: Decoder) -> None:
    """Makes sure that a decoder writes what its target alone would, greedily and sampled.

    Args:
        decoder: Around a Hugging Face target.
    """
    target: Any = decoder.target
    for prompt in PROMPTS:
        for temperature, seed in ((0.0, 0), (0.9, 3)):
            settings: dict[str, Any] = {"temperature": temperature, "seed": seed}
            result = decoder.generate(prompt, max_new_tokens=NEW_TOKENS, **settings)
            expected = reference_text(target.model, prompt, NEW_TOKENS, stop_ids=target.stop_ids, **settings)
            assert list(result.token_ids) == expected, (
                f"another text than the target's own at {settings}, for the prompt {bytes(prompt[1:])!r}"
            )


def read(target: HuggingFaceTarget, token_ids: Sequence[int], tap_layers: Sequence[int]) -> Tensor | None:
    """The target's tapped states along a text, `[1, n, F]`.

    Args:
        target: The target.
        token_ids: The text.
        tap_layers: Layers.
    """
    state = target.start(1, len(token_ids) + 1, tap_layers)
    return target.prefill(state, torch.tensor([list(token_ids)], device=target.device)).taps


def trees_of(draft: BlockDraft | Proposal, limits: Limits) -> list[tuple[list[tuple[int, ...]], list[float]]]:
    """What a draft comes to: paths and weights of its best trees, to compare drafts by.

    Args:
        draft: The draft.
        limits: Of the trees.

    Returns:
        For each row, token paths from the root by falling weight, and their log-weights.
    """
    if isinstance(draft, BlockDraft):
        draft = NoRefiner().refine(draft, Marginal().build(draft, 0, limits))
    tree = OptTree(limits.nodes).select(draft, limits)
    tree.validate()
    counts = tree.num_nodes.tolist()
    return [(tree.paths(row), tree.log_weights[row, 1:count].tolist()) for row, count in enumerate(counts)]
