"""The DFlash backbone as a network: a block of masks attends to the target's hidden states.

Source: DFlash (arXiv:2602.06036). Tensor names are those of its public checkpoints.
"""

from collections.abc import Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from treeflash.layouts import Joined, Linear

# Positions of context whose keys and values are made at once.
_CONTEXT_PIECE = 512


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: `states` `[B, heads, n, d]`, `cos` and `sin` `[B, n, d]`."""
    low, high = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


def _write(room: Tensor, states: Tensor, start: int | Tensor) -> None:
    """Writes `[..., B, heads, n, d]` into `[..., B, heads, capacity, d]`, from `start` of each row on."""
    count = states.shape[-2]
    if isinstance(start, int):
        room.narrow(-2, start, count).copy_(states)
        return
    for row, first in enumerate(start.tolist()):
        room.select(-4, row).narrow(-2, first, count).copy_(states.select(-4, row))


@attrs.frozen(eq=False)
class Piece:
    """Slots of a row of blocks whose attention is computed together, as training does.

    Attributes:
        slots: Which, in the row of slots; they see each other, if at all.
        context: Which of the text's positions they see, if at all.
        visible: bool `[slots, context + slots]`: whom each slot sees.
    """

    slots: slice
    context: slice
    visible: Tensor


class Norm(nn.RMSNorm):
    """RMS norm in the precision of its weights: under autocast states may have less."""

    def forward(self, states: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        return super().forward(states.to(self.weight.dtype))


class Attention(nn.Module):
    """Block queries over the context's and the block's own keys and values.

    Args:
        config: Sizes.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        query, key = (
            heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        bias = config.attention_bias
        self.q_proj = Linear(config.hidden_size, query, bias=bias)
        self.k_proj = Linear(config.hidden_size, key, bias=bias)
        self.v_proj = Linear(config.hidden_size, key, bias=bias)
        self.o_proj = Linear(query, config.hidden_size, bias=bias)
        self.q_norm = Norm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Norm(self.head_dim, eps=config.rms_norm_eps)
        self._joined = Joined()
        self._head_counts = config.num_attention_heads, config.num_key_value_heads

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(*states.shape[:-1], -1, self.head_dim)

    def keys_values(self, states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed and rotated) and values of `states` `[B, n, D]`: `[B, heads, n, d]` each."""
        keys = self.k_norm(self._heads(self.k_proj(states))).transpose(1, 2)
        values = self._heads(self.v_proj(states)).transpose(1, 2)
        return _rotate(keys, cos, sin), values

    def queries_keys_values(self, block: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (normed and rotated) and values of a block that is decoded.

        Args:
            block: `[B, n, D]`.
            cos: `[B, n, d]`.
            sin: `[B, n, d]`.

        Returns:
            `[B, heads, n, d]`, and twice `[B, key heads, n, d]`.
        """
        joined = self._joined([self.q_proj, self.k_proj, self.v_proj], block)
        heads, key_heads = self._head_counts
        queries, keys, values = torch.split(
            self._heads(joined).transpose(1, 2), [heads, key_heads, key_heads], dim=1
        )
        turned = _rotate(torch.cat([self.q_norm(queries), self.k_norm(keys)], dim=1), cos, sin)
        return turned[:, :heads], turned[:, heads:], values

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
        """Attention of `[B, heads, n, d]` over `[B, key heads, m, d]`: `[B, n, D]`.

        Args:
            queries: `[B, heads, n, d]`.
            keys: `[B, key heads, m, d]`.
            values: As `keys`.
            visible: bool `[B, 1, 1, m]`: which keys each row sees; None for all.
        """
        return self._output(
            functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
        )

    def of_pieces(
        self,
        slots: Tensor,
        before: tuple[Tensor, Tensor],
        within: tuple[Tensor, Tensor],
        cos: Tensor,
        sin: Tensor,
        pieces: Sequence[Piece],
    ) -> Tensor:
        """Attention of many blocks' slots, `[1, m, D]`, over keys and values of context and slots."""
        queries = _rotate(self.q_norm(self._heads(self.q_proj(slots))).transpose(1, 2), cos, sin)
        mixed = []
        for piece in pieces:
            keys, values = (
                torch.cat([old[:, :, piece.context], new[:, :, piece.slots]], dim=2)
                for old, new in zip(before, within, strict=True)
            )
            mixed.append(
                functional.scaled_dot_product_attention(
                    queries[:, :, piece.slots], keys, values, attn_mask=piece.visible, enable_gqa=True
                )
            )
        return self._output(torch.cat(mixed, dim=2))

    def _output(self, mixed: Tensor) -> Tensor:
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Mlp(nn.Module):
    """SwiGLU.

    Args:
        config: Sizes.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """`[..., D]` to `[..., D]`."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    """Pre-norm decoder layer. The context enters its attention alone, as keys and values.

    Args:
        config: Sizes.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)


class DFlashNetwork(nn.Module):
    """Backbone weights and the two passes made over them: the context's and the block's.

    Args:
        config: Sizes, in Qwen3's terms.
        num_taps: Target layers whose outputs make the context, L.
    """

    def __init__(self, config: Qwen3Config, num_taps: int) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self._of_context = Joined()

    def reset(self, generator: torch.Generator) -> None:
        """Gives the weights their first values: norms 1, biases 0, all others small and random.

        Args:
            generator: Of the draws, on the CPU.
        """
        for name, weight in self.named_parameters():
            with torch.no_grad():
                if weight.ndim == 1:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)
                else:
                    weight.copy_(torch.empty(weight.shape).normal_(std=0.02, generator=generator))

    def positions(self, like: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions from `start` on.

        Args:
            like: `[B, n, D]`.
            start: The first, of all rows or int64 `[B]` on the CPU.

        Returns:
            `[1, n, d]`, or `[B, n, d]` where rows differ.
        """
        ids = torch.arange(like.shape[1], device=like.device)[None]
        ids = ids + (start[:, None].to(ids.device, non_blocking=True) if isinstance(start, Tensor) else start)
        cos, sin = self.prepare_rotary()(like, ids)
        return cos, sin

    def prepare_rotary(self) -> Any:
        """Gives the rotary embedding, made on first use on the weights' device; it has no weights."""
        if "_rotary" not in self.__dict__:
            # Kept out of the submodules: a checkpoint does not name it, a cast must not round it.
            self.__dict__["_rotary"] = Qwen3RotaryEmbedding(self.config).to(self.fc.weight.device)
        return self.__dict__["_rotary"]

    def write_context(self, taps: Tensor, cache: Tensor, start: int | Tensor) -> None:
        """Writes the context keys and values of newly accepted positions.

        Args:
            taps: `[B, n, L * D]`, the target's tapped states.
            cache: `[layers, 2, B, heads, capacity, d]`, written at `start` to `start + n`.
            start: Position of the first, of all rows or int64 `[B]` on the CPU.
        """
        context = self.hidden_norm(self.fc(taps))
        cos, sin = self.positions(context, start)
        # All layers see the same context, so that their keys and values are made together; of a long prompt
        # in pieces, since as many layers take as many times the memory.
        attentions = [layer.self_attn for layer in cast(list[Layer], self.layers)]
        maps = [part for attention in attentions for part in (attention.k_proj, attention.v_proj)]
        for begin in range(0, taps.shape[1], _CONTEXT_PIECE):
            piece = slice(begin, begin + _CONTEXT_PIECE)
            joined = self._of_context(maps, context[:, piece])
            heads = joined.view(*joined.shape[:2], len(cache), 2, -1, self.config.head_dim)
            keys, values = heads.permute(2, 3, 0, 4, 1, 5).unbind(1)
            normed = torch.stack(
                [attention.k_norm(part) for attention, part in zip(attentions, keys, strict=True)]
            )
            _write(cache[:, 0], _rotate(normed, cos[:, piece], sin[:, piece]), start + begin)
            _write(cache[:, 1], values, start + begin)

    def forward(self, block: Tensor, cache: Tensor, start: int | Tensor) -> tuple[Tensor, Tensor]:
        """Drafts one block.

        Args:
            block: Embeddings of the anchor and the masks, `[B, 1 + P, D]`.
            cache: `[layers, 2, B, heads, capacity, d]`: context up to `start`; the rows behind are
                used as scratch room.
            start: The anchor's position, of all rows or int64 `[B]` on the CPU.

        Returns:
            Hidden states before and behind the final norm, `[B, 1 + P, D]` each.
        """
        cos, sin = self.positions(block, start)
        count, visible = block.shape[1], None
        if isinstance(start, Tensor):
            ends = (start + count).to(block.device, non_blocking=True)
            seen = int(start.max()) + count
            visible = (torch.arange(seen, device=block.device) < ends[:, None])[:, None, None]
        else:
            seen = start + count
        states = block
        for layer, room in zip(cast(list[Layer], self.layers), cache, strict=True):
            attention, normed = layer.self_attn, layer.input_layernorm(states)
            queries, keys, values = attention.queries_keys_values(normed, cos, sin)
            _write(room[0], keys, start)
            _write(room[1], values, start)
            keys, values = room[0, :, :, :seen], room[1, :, :, :seen]
            if visible is not None:
                # What is behind a shorter row was never written: a mask does not keep a NaN out.
                hidden = ~visible.transpose(2, 3)
                keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
            states = states + attention(queries, keys, values, visible)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return states, self.norm(states)

    def forward_blocks(
        self,
        blocks: Tensor,
        taps: Tensor,
        positions: Tensor,
        context_positions: Tensor,
        pieces: Sequence[Piece],
    ) -> tuple[Tensor, Tensor]:
        """Drafts many blocks of one row of text at once, as training does; nothing is cached.

        Args:
            blocks: Embeddings of all blocks' slots, `[1, m, D]`.
            taps: `[1, S, L * D]`, the target's tapped states along the text.
            positions: int64 `[1, m]`, of the slots.
            context_positions: int64 `[1, S]`, of the text.
            pieces: Which context and slots each slot sees; they cover the slots in order.

        Returns:
            Hidden states before and behind the final norm, `[1, m, D]` each.
        """
        rotary = self.prepare_rotary()
        context = self.hidden_norm(self.fc(taps))
        # Cosines take after what they are given: float32, though autocast may have made the context less.
        of_context, (cos, sin) = rotary(blocks, context_positions), rotary(blocks, positions)
        states = blocks
        for layer in cast(list[Layer], self.layers):
            normed = layer.input_layernorm(states)
            before = layer.self_attn.keys_values(context, *of_context)
            within = layer.self_attn.keys_values(normed, cos, sin)
            states = states + layer.self_attn.of_pieces(normed, before, within, cos, sin, pieces)
            states = states + layer.mlp(layer.post_attention_layernorm(states))
        return states, self.norm(states)
