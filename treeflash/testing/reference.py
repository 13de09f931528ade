"""Plain decoding written out: the whole text through the model again for every token."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def reference_text(
    model: PreTrainedModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    sequence: int = 0,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """What a model writes by itself, without a cache, a mask or anything else of this package.

    Args:
        model: The model.
        prompt: Token ids.
        max_new_tokens: Tokens to write at most.
        temperature: As in `Decoder.generate`.
        seed: As in `Decoder.generate`.
        sequence: As in `Decoder.generate`.
        stop_ids: Tokens that end the text.

    Returns:
        The new tokens.
    """
    text = list(prompt)
    for _ in range(max_new_tokens):
        ids = torch.tensor([text], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        if temperature > 0:
            exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
            key = np.array([seed, sequence], dtype=np.uint64)
            philox = np.random.Philox(key=key, counter=[0, 0, 0, len(text)])
            race = np.random.Generator(philox).standard_exponential(len(logits))
            noise = torch.from_numpy(-np.log(race)).to(exact).to(logits.device)
            logits = logits.to(exact) + temperature * noise
        text.append(int(logits.argmax()))
        if text[-1] in stop_ids:
            break
    return text[len(prompt) :]
