"""The best that can be said of a position without knowing what comes before it: the true marginal.

A drafter of blocks sees the prefix alone, so that at depth d the best it could give is the target's own
distribution there, averaged over all that the target might write in between. The average is taken over
sampled paths, of each the whole conditional distribution, not the token drawn.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from treeflash.target import HuggingFaceTarget


@torch.inference_mode()
def true_marginal(
    target: HuggingFaceTarget, prefix: Tensor, depth: int, paths: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Samples paths behind a prefix.

    Args:
        target: The target.
        prefix: int64 `[n]`: everything up to the anchor, which is the last.
        depth: Levels, P.
        paths: How many, an even number.
        generator: Of the paths, on the CPU.

    Returns:
        The marginal float32 `[P, V]`, and by depth the distance between the averages of two halves of the
        paths, float32 `[P]`: half of it is about what the marginal is off by.
    """
    cache = DynamicCache(config=target.model.config)
    count = len(prefix)
    ids = prefix[None]
    mask = torch.ones_like(ids)
    logits = target.plain_forward(ids, mask, torch.arange(count, device=ids.device)[None], cache)
    cache.batch_repeat_interleave(paths)
    mask = mask.expand(paths, -1)
    given = logits[0, 0, : target.vocab_size].float().softmax(dim=-1).expand(paths, -1)
    levels, apart = [], []
    for level in range(depth):
        one, other = given[: paths // 2].mean(dim=0), given[paths // 2 :].mean(dim=0)
        levels.append((one + other) / 2)
        apart.append(0.5 * (one - other).abs().sum())
        if level + 1 == depth:
            break
        drawn = torch.multinomial(given.cpu(), 1, generator=generator).to(ids.device)
        mask = torch.cat([mask, mask.new_ones(paths, 1)], dim=1)
        where = torch.full_like(drawn, count + level)
        logits = target.plain_forward(drawn, mask, where, cache)
        given = logits[:, 0, : target.vocab_size].float().softmax(dim=-1)
    return torch.stack(levels), torch.stack(apart)
