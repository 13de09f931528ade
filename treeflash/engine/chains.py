"""What one decoding step emits from given places of a known text."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from treeflash.components.selectors.chain import Chain
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.engine.decoder import Decoder
from treeflash.engine.replay import Replay
from treeflash.target import HuggingFaceTarget


def chain_steps(
    decoder: Decoder, target: HuggingFaceTarget, token_ids: Tensor, anchors: Sequence[int]
) -> list[int]:
    """Takes one decoding step from each anchor of a text, drafting a chain of likeliest tokens.

    The steps are the decoder's own: it reads the prompt, extends its drafter, drafts and verifies. Only the
    target's choices come from the text, and are verified exactly.

    Args:
        decoder: Its drafter, builder and refiner are used; bound to `target` again at the end.
        target: The target that wrote the text.
        token_ids: int64 `[n]` on the target's device: prompt and answer.
        anchors: Index of each anchor, from 1 to n - 2: the last token before what is drafted.

    Returns:
        Tokens emitted from each anchor, the bonus token included, none past the end of the text.
    """
    replay = Replay.read(target, token_ids, decoder.drafter.tap_layers)
    emitted = []
    try:
        follower = attrs.evolve(decoder, target=replay, selector=Chain(), verifier=SdpaTree())
        for anchor in anchors:
            # The prefill chooses the anchor; the step after it is the one to measure.
            stream = follower.stream(token_ids[:anchor], max_new_tokens=len(token_ids) - anchor, stop_ids=())
            next(stream)
            emitted.append(len(next(stream).token_ids))
    finally:
        attrs.evolve(decoder, target=target)
    return emitted


def spread_anchors(first: int, end: int, most: int) -> list[int]:
    """Places anchors evenly along an answer.

    Args:
        first: Index of the answer's first token.
        end: Length of the text.
        most: Anchors wanted; fewer if the answer is shorter.

    Returns:
        Ascending, distinct; each has a token of the answer after it and one of the text before it.
    """
    places = torch.linspace(max(1, first - 1), end - 2, min(most, max(0, end - first))).round().long()
    return sorted({place for place in places.tolist() if 1 <= place <= end - 2})
