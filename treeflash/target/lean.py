"""A pass over the weights of a Llama-like decoder in as few operations as its arithmetic takes.

A library's forward serves every use of a model. For one row of tokens on a CPU, most of its time goes into
everything around the matrix products: here rotations, norms and caches are written for this use alone, and
the products go over weights laid out for them. The arithmetic is the model's own, up to rounding.
"""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from treeflash.layouts import Blocks, is_hooked, recheck
from treeflash.target.cache import TreeCache
from treeflash.target.masks import FULL, SLIDING

# Families whose layers are: norm, attention, residual; norm, gated SiLU, residual.
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
# What such a model is made of: their classes, not classes made from them, and the library's own parts.
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_OTHERS = (nn.Linear, nn.Embedding, nn.ModuleList, nn.SiLU, SiLUActivation)
# Rows up to which heads that share keys are folded into one product: a prompt's mask would grow too large.
MOST_FOLDED = 256


class LeanDecoder:
    """A decoder and its head, read through their own modules' weights.

    Args:
        model: The model, of a family that `of` knows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        self._embedding: Any = model.get_input_embeddings()
        self._rotary: Any = decoder.rotary_emb
        self._norm: Any = decoder.norm
        self._layers = [_Layer(layer, decoder.config) for layer in decoder.layers]
        self.head = Blocks([model.get_output_embeddings()])
        self._modules = list(model.modules())

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self | None:
        """Reads a model leanly, when it is nothing but what its family's layers are.

        Args:
            model: Any causal language model.

        Returns:
            The decoder; None for other families, and where something is hung into the model: adapters,
            hooks, other activations.
        """
        return cls(model) if _is_plain_family(model) else None

    def weights(self) -> Sequence[Tensor]:
        """All weights of the model, and what it keeps beside them."""
        return [
            weight
            for module in self._modules
            for held in (module.parameters(recurse=False), module.buffers(recurse=False))
            for weight in held
        ]

    def reads(self, model: PreTrainedModel) -> bool:
        """Whether the model is still what it was: the same modules, and nothing hung into them since."""
        modules = list(model.modules())
        same = len(modules) == len(self._modules) and all(map(operator.is_, modules, self._modules))
        return same and _is_plain_family(model)

    def recheck(self) -> None:
        """Sees changes of the weights that torch does not count, such as those through `weight.data`.

        Those that it counts are seen in each pass. Where no weights are laid out anew, this costs nothing;
        elsewhere they are read once.
        """
        recheck([self.head, *(blocks for layer in self._layers for blocks in layer.blocks)])

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        masks: Tensor | Mapping[str, Tensor] | None,
        cache: TreeCache,
        tap_layers: Sequence[int],
        *,
        last_logits: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass.

        Args:
            token_ids: int64 `[B, n]`.
            positions: int64 `[B, n]`.
            masks: Added to the scores, `[B, 1, n, m]`, by kind of layer when there are several; None when all
                is seen.
            cache: Read, and written behind what it holds.
            tap_layers: Layers whose outputs are wanted.
            last_logits: Whether those of the last token do.

        Returns:
            Logits `[B, n, V]` or `[B, 1, V]`, and the taps side by side `[B, n, F]`, or None.
        """
        states: Tensor = self._embedding(token_ids)
        cos, sin = self._rotary(states, positions)
        half = cos.shape[-1] // 2
        # The halves of a head are exchanged by rolling it: the sign goes with the sine.
        turn = cos[:, :, None], torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)[:, :, None]
        by_kind = masks if isinstance(masks, Mapping) else {layer.kind: masks for layer in self._layers}
        folded = token_ids.shape[1] <= MOST_FOLDED
        if folded:
            groups = self._layers[0].groups
            by_kind = {
                kind: None if mask is None else _for_each_head(mask, groups) for kind, mask in by_kind.items()
            }
        outputs = {}
        for index, (layer, room) in enumerate(zip(self._layers, cache.layers, strict=True)):
            states = layer(states, turn, by_kind[layer.kind], room, folded=folded)
            if index in tap_layers:
                outputs[index] = states
        normed = rms_norm(states, self._norm)
        outputs[len(self._layers) - 1] = normed
        logits = self.head(normed[:, -1:] if last_logits else normed)
        taps = torch.cat([outputs[layer] for layer in tap_layers], dim=-1) if tap_layers else None
        return logits, taps


class _Layer:
    """One decoder layer.

    Args:
        layer: The model's.
        config: The decoder's.
    """

    def __init__(self, layer: Any, config: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._before, self._behind = layer.input_layernorm, layer.post_attention_layernorm
        self._attention = attention
        self._join = Blocks([attention.q_proj, attention.k_proj, attention.v_proj])
        self._mix, self._down = Blocks([attention.o_proj]), Blocks([mlp.down_proj])
        # Apart: side by side they are as many columns as the library multiplies badly.
        self._gate, self._up = Blocks([mlp.gate_proj]), Blocks([mlp.up_proj])
        self.blocks = (self._join, self._mix, self._gate, self._up, self._down)
        self._head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        kinds = getattr(config, "layer_types", None)
        usual = FULL if getattr(config, "sliding_window", None) is None else SLIDING
        self.kind: str = kinds[attention.layer_idx] if kinds else usual
        self._width: int = attention.head_dim
        self._heads = attention.q_proj.weight.shape[0] // self._width
        self._key_heads = attention.k_proj.weight.shape[0] // self._width
        self.groups = self._heads // self._key_heads

    def __call__(
        self, states: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, room: Any, *, folded: bool
    ) -> Tensor:
        """`[B, n, D]` to `[B, n, D]`; keys and values go into `room`.

        Folded, heads that share keys are further rows of one product, those of a token behind one another,
        and `mask` is `[B, 1, n * groups, m]`; otherwise it is `[B, 1, n, m]`.
        """
        batch, count, _ = states.shape
        turned = self._heads + self._key_heads
        joined = self._join(rms_norm(states, self._before))
        heads = joined.view(batch, count, turned + self._key_heads, self._width)
        pairs = heads[:, :, :turned]
        query_norm, key_norm = self._head_norms
        if query_norm is not None:
            queries, keys = pairs[:, :, : self._heads], pairs[:, :, self._heads :]
            pairs = torch.cat([rms_norm(queries, query_norm), rms_norm(keys, key_norm)], dim=2)
        cos, sin = turn
        pairs = torch.addcmul(pairs * cos, pairs.roll(self._width // 2, dims=-1), sin)
        keys, values = room.update(
            pairs[:, :, self._heads :].transpose(1, 2), heads[:, :, turned:].transpose(1, 2)
        )
        groups = self.groups if folded else 1
        shared = self._heads // groups
        queries = pairs[:, :, : self._heads].view(batch, count, shared, groups, self._width)
        queries = queries.transpose(1, 2).flatten(2, 3)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self._attention.scaling, enable_gqa=not folded
        )
        mixed = mixed.view(batch, shared, count, groups, self._width)
        states = states + self._mix(mixed.transpose(1, 2).flatten(2))
        normed = rms_norm(states, self._behind)
        return states + self._down(functional.silu(self._gate(normed)).mul_(self._up(normed)))


def _for_each_head(mask: Tensor, groups: int) -> Tensor:
    """`[B, 1, n, m]` to `[B, 1, n * groups, m]`, each row as often as heads share keys."""
    return mask[:, :, :, None].expand(-1, -1, -1, groups, -1).flatten(2, 3)


def rms_norm(states: Tensor, norm: Any) -> Tensor:
    """RMS norm in float32, as these families have it, and rounded where they round.

    Args:
        states: `[..., D]`.
        norm: The model's module: `weight` `[D]` and `variance_epsilon`.

    Returns:
        `[..., D]` in the dtype of `states`.
    """
    wide = states.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(norm.variance_epsilon).rsqrt_()
    out: Tensor = (wide * scale).to(states.dtype) * norm.weight
    return out


def _is_plain_family(model: PreTrainedModel) -> bool:
    """Whether a model is of a known family, and all of it is the library's own."""
    name = type(model).__name__
    if not any(name == f"{family}ForCausalLM" for family in _FAMILIES):
        return False
    own = {f"{name.removesuffix('ForCausalLM')}{part}" for part in _PARTS}
    return all(_is_plain(module, own) for module in model.modules())


def _is_plain(module: nn.Module, own: Collection[str]) -> bool:
    """Whether a part of a model is the library's own, with nothing hung into it."""
    kind = type(module)
    known = kind in _OTHERS or (kind.__name__ in own and kind.__module__.startswith("transformers.models."))
    return known and not is_hooked(module)
