"""What the engine expects of a verifier."""

import math
from unittest import SkipTest

import torch

from treeflash.components.builders.top_m import TopM
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.interfaces import Verifier
from treeflash.places import locate
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget
from treeflash.testing.contracts.contract import (
    MODELS,
    PROMPTS,
    Contract,
    check_lossless,
    check_options,
    read,
)
from treeflash.testing.reference import reference_text
from treeflash.tree import TokenTree
from treeflash.types import Acceptance, DecodeState


class VerifierContract(Contract):
    """Subclass it and say how the verifier is made."""

    def make(self) -> Verifier:
        """Makes the verifier."""
        raise NotImplementedError

    def test_it_can_be_configured(self) -> None:
        """Options are an attrs class, and it is documented."""
        check_options(self.make())

    @torch.inference_mode()
    def test_it_accepts_a_path_of_the_tree(self) -> None:
        """From the root down, with the tokens of its nodes and one more, and the target's states along it."""
        acceptance, tree, target = self._verified()
        (path,), (tokens,) = acceptance.paths, acceptance.tokens
        assert path[0] == 0, "a path begins at the root"
        parents, drafted = tree.parents[0].tolist(), tree.token_ids[0].tolist()
        assert [parents[node] for node in path[1:]] == path[:-1], f"not a path of the tree: {path}"
        assert tokens[:-1] == [drafted[node] for node in path[1:]], "other tokens than the accepted nodes'"
        assert len(tokens) == len(path), "the bonus token comes last"
        assert acceptance.num_accepted == [len(path) - 1]
        assert acceptance.num_drafted == [5]
        if acceptance.expected is not None:
            (expected,) = acceptance.expected
            assert abs(expected - 1.375) < 1e-3, "what the nodes' weights promise, without the root's"
        text = [*PROMPTS[0], *(drafted[node] for node in path)]
        expected_states = read(target, text, (0, target.num_layers - 1))
        assert acceptance.taps is not None, "expected the tapped states of the accepted path, found none"
        assert expected_states is not None, "two layers are tapped"
        torch.testing.assert_close(
            acceptance.taps,
            expected_states[:, len(PROMPTS[0]) :],
            atol=1e-3,
            rtol=1e-3,
            msg=lambda text: f"states of the accepted path are not the target's: {text}",
        )

    @torch.inference_mode()
    def test_it_accepts_the_longest_path_that_the_target_writes(self) -> None:
        """Of a tree with the text on one path and other tokens beside it; unless it is lossy on purpose."""
        self._skip_if_lossy()
        acceptance, _, target = self._verified()
        text = reference_text(target.model, PROMPTS[0], 5)
        assert acceptance.paths == [[0, 1, 3, 4]]
        assert acceptance.tokens == [text[1:5]], "the accepted draft tokens, then the bonus token"

    def test_the_text_is_the_targets_own(self) -> None:
        """With good drafts; unless it is lossy on purpose."""
        self._skip_if_lossy()
        target = self.target()
        refiner = SwiGlu.from_checkpoint(locate(f"{MODELS}/tiny-treeflash"), target)
        drafter = self.trained_drafter(target)
        check_lossless(Decoder(target, drafter, TopM(4, 4), refiner, OptTree(9), self.make()))

    def _skip_if_lossy(self) -> None:
        if not self.make().lossless:
            raise SkipTest("lossy on purpose")

    def _verified(self) -> tuple[Acceptance, TokenTree, HuggingFaceTarget]:
        """What the verifier makes of a tree: the tree, and the target that read it."""
        verifier, target, prompt = self.make(), self.target(), PROMPTS[0]
        text = reference_text(target.model, prompt, 5)
        wrong = [(token + 1) % target.vocab_size for token in text]
        layers = (0, target.num_layers - 1)
        state = target.start(1, 64, layers)
        target.prefill(state, torch.tensor([list(prompt)], device=target.device))
        # The anchor, its right child, a wrong one, then two right ones and a wrong leaf.
        tree = TokenTree.from_lists(
            [text[0], text[1], wrong[1], text[2], text[3], wrong[4]],
            [-1, 0, 0, 1, 3, 4],
            [math.log(weight) for weight in (1, 0.5, 0.25, 0.25, 0.25, 0.125)],
            device=target.device,
        )
        recent = torch.tensor([[prompt[-1], text[0]]], device=target.device)
        decoding = DecodeState(recent, torch.tensor([len(prompt)]), state, None)
        return verifier.verify(target, decoding, tree, Draws()), tree, target
