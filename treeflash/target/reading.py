"""What a Hugging Face target does for training: batches without trees, texts without a cache, labels."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from treeflash.errors import InputError, UnsupportedTargetError
from treeflash.layouts import Blocks, recheck
from treeflash.seen import Seen
from treeflash.target.borrowing import Loan
from treeflash.target.masks import additive_masks
from treeflash.target.taps import tapped


class Reading:
    """Passes that decoding has no use for; a part of `HuggingFaceTarget`."""

    model: PreTrainedModel
    config: Any
    layers: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    num_layers: int
    windows: dict[str, int | None]
    loan: Loan
    borrowed: Callable[[], AbstractContextManager[None]]
    _head: "tuple[bytes | None, GatheredHead] | None" = None
    _heads: "WeakSet[GatheredHead]"
    _parameters: set[str]
    _cache_name: str
    decoder: Any
    tap_fault: str | None

    def check_taps(self, tap_layers: Sequence[int]) -> None:
        """Makes sure that the states of layers can be read (see `Target.check_taps`)."""
        beyond = [layer for layer in tap_layers if not 0 <= layer < self.num_layers]
        if beyond:
            raise InputError(f"tap layers: expected 0..{self.num_layers - 1}, found {beyond}")
        if tap_layers and self.tap_fault is not None:
            name = type(self.model).__name__
            raise UnsupportedTargetError(
                f"{name}: the states of its layers cannot be read: {self.tap_fault}; expected a drafter that "
                "reads none of them"
            )

    def modules_of(self, tap_layers: Sequence[int]) -> list[nn.Module | None]:
        """Finds the modules whose outputs are the states of layers.

        Args:
            tap_layers: Layers, checked.

        Returns:
            A module for each; None for the last one, whose states are the decoder's own output.
        """
        last = self.num_layers - 1
        return [None if layer == last else self.layers[layer] for layer in tap_layers]

    def plain_forward(self, token_ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """A pass without trees, over rows padded on the left, for throughput.

        Args:
            token_ids: int64 `[B, n]`.
            mask: int64 `[B, cached + n]`, 0 for padding.
            positions: int64 `[B, n]`.
            cache: A cache of the model's own kind, extended.

        Returns:
            Logits of the last position, `[B, 1, V]`.
        """
        inputs = {
            "input_ids": token_ids,
            "attention_mask": mask,
            "position_ids": positions,
            self._cache_name: cache,
            "use_cache": True,
            "return_dict": True,
        }
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = 1
        with self.borrowed():
            logits: Tensor = self.model(**inputs).logits
        return logits[:, -1:, : self.vocab_size]

    def read(
        self, token_ids: Tensor, positions: Tensor, visible: Tensor, tap_layers: Sequence[int]
    ) -> Tensor:
        """Reads tokens in one pass without a cache (see `TrainingTarget.read`)."""
        return self.read_with_logits(token_ids, positions, visible, tap_layers)[0]

    @torch.no_grad()
    def read_with_logits(
        self, token_ids: Tensor, positions: Tensor, visible: Tensor, tap_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Reads tokens in one pass without a cache, and takes the model's own logits of it.

        Args:
            token_ids: int64 `[n]`.
            positions: int64 `[n]`.
            visible: bool `[n, n]`: which tokens each may see.
            tap_layers: Layers whose outputs are wanted, as in `start`.

        Returns:
            `[n, F]`, side by side, and the last token's logits `[1, V]`.
        """
        where = positions[None]
        inputs: dict[str, Any] = {
            "input_ids": token_ids[None],
            "position_ids": where,
            "attention_mask": additive_masks(self.windows, visible[None], where, where, self.dtype),
            "use_cache": False,
            "return_dict": True,
        }
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = 1
        self.check_taps(tap_layers)
        # In the target's own precision, whatever the trainer around it computes in.
        plain = torch.autocast(self.device.type, enabled=False)
        with plain, self.borrowed(), tapped(self.decoder, self.modules_of(tap_layers)) as outputs:
            logits: Tensor = self.model(**inputs).logits
        return torch.cat(outputs, dim=-1)[0], logits[0, -1:, : self.vocab_size]

    def head(self, columns: Tensor | None, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The output head over some tokens (see `Target.head`)."""
        wanted = None if columns is None else columns.cpu().numpy().tobytes()
        with self.loan.lock:  # another thread's text looks through the heads as it begins
            if dtype == self.dtype and self._head is not None and self._head[0] == wanted:
                return self._head[1]
            kept = slice(self.vocab_size) if columns is None else columns.to(self.device)
            made = GatheredHead(self.model, kept, dtype)
            self._heads.add(made)
            if dtype == self.dtype:
                # The last one is kept: drafters are bound to one target again and again.
                self._head = wanted, made
            return made

    def head_rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output head's weights for tokens (see `Target.head_rows`)."""
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return functional.embedding(token_ids, head.weight), None if bias is None else bias[token_ids]

    def finish(self, logits: Tensor) -> Tensor:
        """Scales or caps logits as the family does (see `TrainingTarget.finish`)."""
        config = self.config
        logits = logits * (getattr(config, "logit_scale", None) or 1.0)
        logits = logits / (getattr(config, "logits_scaling", None) or 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap


class GatheredHead:
    """The rows of a model's output head for some tokens, gathered anew when its weights have changed.

    Args:
        model: The model.
        kept: The tokens: int64 `[V']`, or a slice of the vocabulary.
        dtype: Of the products.
    """

    def __init__(self, model: PreTrainedModel, kept: Tensor | slice, dtype: torch.dtype) -> None:
        self._model, self._kept, self._dtype = model, kept, dtype
        self._made: tuple[Seen, Blocks] | None = None

    def recheck(self) -> None:
        """Sees changes of the weights that `Seen` does not notice: gathers them, and compares."""
        made = self._made
        if made is None:
            return
        rows, before = self._gather(self._parts()), made[1].watched()
        if len(rows) == len(before) and all(map(torch.equal, rows, before)):
            recheck([made[1]])  # rows that are the model's own weights changed with them
        else:
            self._made = None

    def __call__(self, normed: Tensor) -> Tensor:
        """`[..., D]` to logits `[..., V']`."""
        made, parts = self._made, self._parts()
        if made is None or not made[0].is_of(parts):
            rows = self._gather(parts)
            gathered = SimpleNamespace(weight=rows[0], bias=rows[1] if len(rows) > 1 else None)
            made = self._made = Seen(parts), Blocks([gathered])
        return made[1](normed.to(self._dtype))

    def _parts(self) -> list[Tensor]:
        """The weight, and the bias where there is one."""
        head = self._model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        return [head.weight] if bias is None else [head.weight, bias]

    def _gather(self, parts: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False):  # whoever asks first, others may differentiate through it
            return [part.detach()[self._kept].to(self._dtype) for part in parts]
