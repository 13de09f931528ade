"""Plain decoding of many prompts at once, for data: throughput counts, not latency."""

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor
from transformers import DynamicCache

from treeflash.engine.stopping import StopRule
from treeflash.errors import InputError
from treeflash.sampling import Draws
from treeflash.target import HuggingFaceTarget

# Finished rows are taken out of the batch once this share of it is idle.
_IDLE_SHARE = 0.25


@attrs.frozen
class Answer:
    """What the target wrote.

    Attributes:
        token_ids: New tokens, a stop token included.
        stop_reason: As in `Generation`.
    """

    token_ids: list[int]
    stop_reason: str


@attrs.define(eq=False)
class _Row:
    """A sequence still being written."""

    index: int
    length: int  # positions in the cache, the padding left out
    rule: StopRule
    tokens: list[int] = attrs.field(factory=list)


@torch.inference_mode()
def decode_batch(
    target: HuggingFaceTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    sequences: Sequence[int] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Writes one answer to each prompt, with the model's own cache and padding on the left.

    Draws are a function of (seed, sequence, position), so that a sampled answer does not depend on the batch
    it is written in, but for rounding.

    Args:
        target: The target.
        prompts: Token ids; best of similar length, since shorter ones are padded.
        max_new_tokens: Tokens to write at most, each.
        temperature: 0 takes the likeliest token.
        seed: Of the draws.
        sequences: Number of each prompt's sequence; 0, 1, ... when not given.
        on_tokens: Called after each step with the number of tokens it wrote.

    Returns:
        The answers, in the prompts' order.

    Raises:
        InputError: For an empty prompt, or one that leaves no room for an answer.
    """
    numbers = list(range(len(prompts))) if sequences is None else list(sequences)
    rows = [_start(target, index, prompt, max_new_tokens) for index, prompt in enumerate(prompts)]
    answers: dict[int, Answer] = {}
    alone = partial(decode_batch, target, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    cache = DynamicCache(config=target.model.config)
    ids, mask = _padded(prompts, target.device)
    longest = ids.shape[1]
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    last_position = torch.iinfo(torch.int64).max if target.max_positions is None else target.max_positions - 1
    while True:
        logits = target.plain_forward(ids, mask, positions, cache)
        draws = Draws(temperature, seed, tuple(numbers[row.index] for row in rows))
        roots = torch.tensor([row.length - 1 for row in rows])
        chosen = draws.choose(logits, roots, torch.zeros_like(ids[:, -1:]), 0)
        # A NaN among the logits is the one that is chosen.
        finite = logits.gather(2, chosen[..., None])[..., 0].isfinite()
        written = 0
        for row, (token, is_finite) in zip(rows, torch.cat([chosen, finite], dim=1).tolist(), strict=True):
            if row.index in answers:
                continue  # finished, and idle until it is taken out
            if not is_finite and len(prompts[row.index]) < longest:
                # No mask keeps out what overflows in the padding. By itself the prompt has none.
                (answer,) = alone([prompts[row.index]], sequences=[numbers[row.index]])
                written += len(answer.token_ids) - len(row.tokens)
                answers[row.index] = answer
                continue
            kept, reason = row.rule.clip([token], len(row.tokens))
            row.tokens += kept
            written += len(kept)
            if reason is not None:
                answers[row.index] = Answer(row.tokens, reason)
        if on_tokens is not None:
            on_tokens(written)
        if len(answers) == len(prompts):
            break
        live = [slot for slot, row in enumerate(rows) if row.index not in answers]
        for row in rows:
            row.length += 1
        # A finished row goes on for a while: not past the last position the model knows.
        positions = (positions[:, -1:] + 1).clamp(max=last_position)
        mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        ids = chosen
        if len(live) <= (1 - _IDLE_SHARE) * len(rows):
            keep = torch.tensor(live, dtype=torch.int64, device=ids.device)
            rows = [rows[slot] for slot in live]
            ids, mask, positions = ids[keep], mask[keep], positions[keep]
            cache.batch_select_indices(keep)
    return [answers[index] for index in range(len(prompts))]


def _start(target: HuggingFaceTarget, index: int, prompt: Sequence[int], max_new_tokens: int) -> _Row:
    if not prompt:
        raise InputError(f"prompt {index} is empty: expected at least one token to decode from")
    limit = target.max_positions
    if limit is not None and len(prompt) >= limit:
        raise InputError(
            f"prompt {index} has {len(prompt)} tokens, expected fewer than the target's {limit} positions"
        )
    return _Row(index, len(prompt), StopRule.make(target.stop_ids, len(prompt), max_new_tokens, limit))


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, int64 `[B, longest]`, padded on the left with each prompt's own start."""
    longest = max(map(len, prompts))
    # The states of any other token might overflow.
    ids = torch.tensor([[prompt[0]] * longest for prompt in prompts])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, longest - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
