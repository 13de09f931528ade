"""The EAGLE-3 head as a network: one decoder layer over pairs of a token and the state before it.

Tensor names are those of the public checkpoints.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from treeflash.components.drafters.dflash_network import Mlp, Norm
from treeflash.layouts import Linear

# Target layers whose outputs are fused into one state.
NUM_TAPS = 3


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: `states` `[B, heads, n, d]`, `cos` and `sin` `[B, n, d]`."""
    low, high = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None]


class Attention(nn.Module):
    """Attention whose queries, keys and values come from a token and a state side by side.

    Args:
        config: Sizes.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim: int = config.head_dim
        query, key = (
            heads * self.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        width = 2 * config.hidden_size
        self.q_proj = Linear(width, query, bias=False)
        self.k_proj = Linear(width, key, bias=False)
        self.v_proj = Linear(width, key, bias=False)
        self.o_proj = Linear(query, config.hidden_size, bias=False)

    def _heads(self, states: Tensor) -> Tensor:
        heads = states.shape[-1] // self.head_dim
        return states.view(*states.shape[:-1], heads, self.head_dim).transpose(1, 2)


class Layer(nn.Module):
    """The decoder layer: the state is its residual, the token enters its attention alone.

    Args:
        config: Sizes.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.hidden_norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)


class Eagle3Network(nn.Module):
    """The head's weights, and the pieces of a pass over them.

    A pass has two parts, `keys_values` of what can be seen and `forward` for what looks; training, where who
    sees whom goes piece by piece, makes the second of `queries` and `finish`.

    Args:
        config: Sizes, in Llama's terms.
        draft_vocab_size: Tokens it can draft, V'.
        vocab_size: Tokens of the target.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: LlamaConfig, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(NUM_TAPS * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))

    def target_ids(self) -> Tensor:
        """The target's id of each token of the draft vocabulary, int64 `[V']`."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def draft_among(self, token_ids: Tensor) -> None:
        """Chooses the draft vocabulary.

        Args:
            token_ids: int64 `[V']`, ascending: the target's ids.
        """
        ids = token_ids.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.fill_(False)
        self.t2d[ids] = True

    def reset(self, generator: torch.Generator) -> None:
        """Gives the weights their first values: norms 1, all others small and random.

        Args:
            generator: Of the draws, on the CPU.
        """
        for weight in self.parameters():
            with torch.no_grad():
                if weight.ndim == 1:
                    weight.fill_(1.0)
                else:
                    weight.copy_(torch.empty(weight.shape).normal_(std=0.02, generator=generator))

    def prepare_rotary(self) -> Any:
        """Gives the rotary embedding, made on first use on the weights' device; it has no weights."""
        if "_rotary" not in self.__dict__:
            # Kept out of the submodules: a checkpoint does not name it, a cast must not round it.
            self.__dict__["_rotary"] = LlamaRotaryEmbedding(self.config).to(self.fc.weight.device)
        return self.__dict__["_rotary"]

    def rotary(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[B, n, d]` of `positions` int64 `[B, n]`, in the dtype of `like`."""
        cos, sin = self.prepare_rotary()(like, positions)
        return cos, sin

    def join(self, embedded: Tensor, states: Tensor) -> Tensor:
        """What attention reads: a token's embedding and the state before it, each `[B, n, D]`.

        Returns:
            `[B, n, 2 * D]`.
        """
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], dim=-1)

    def keys_values(self, joined: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values.

        Args:
            joined: `[B, n, 2 * D]`.
            rotary: Of their positions.

        Returns:
            `[B, heads, n, d]` each.
        """
        attention = self.midlayer.self_attn
        keys, values = (attention._heads(part(joined)) for part in (attention.k_proj, attention.v_proj))
        return _rotate(keys, *rotary), values

    def queries(self, joined: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Queries (rotated), `[B, heads, n, d]`, of `joined` `[B, n, 2 * D]`."""
        attention = self.midlayer.self_attn
        return _rotate(attention._heads(attention.q_proj(joined)), *rotary)

    def forward(
        self,
        states: Tensor,
        joined: Tensor,
        rotary: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
    ) -> Tensor:
        """A pass of the layer.

        Args:
            states: The states before the tokens, `[B, n, D]`.
            joined: The same beside the tokens, from `join`.
            rotary: Of the positions.
            keys: All that can be seen, from `keys_values`, the own ones among them.
            values: As `keys`.
            visible: Which of them each sees, as `attend` takes it.

        Returns:
            As `finish` gives it, `[B, n, D]`.
        """
        return self.finish(states, attend(self.queries(joined, rotary), keys, values, visible))

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        """What comes out of the layer.

        Args:
            states: The states that went in, `[B, n, D]`.
            mixed: What attention made of them, `[B, heads, n, d]`.

        Returns:
            `[B, n, D]`: before the final norm, and what the next step takes for a state.
        """
        layer = self.midlayer
        states = states + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
        return out


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention under a mask.

    Args:
        queries: `[B, heads, n, d]`.
        keys: `[B, key-value heads, m, d]`.
        values: As `keys`.
        visible: bool, `[n, m]` or `[B, 1, n, m]`: which key each query sees, at least one.

    Returns:
        `[B, heads, n, d]`.
    """
    return functional.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, enable_gqa=True)
