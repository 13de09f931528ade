"""Linear maps over weights laid out for the processor they are on.

A CPU multiplies a few rows by a matrix no faster than it can read the matrix, and reads a matrix in its own
blocked layout up to twice as fast as one in rows. The blocks are made when a map is first used to decode, and
hold the weights a second time; maps that are joined with several others, once for each way.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_WHOLE = slice(None)


class Linear(nn.Linear):
    """`nn.Linear`, over blocks while it decodes; elsewhere (in training) it is just that."""

    def forward(self, states: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return self._blocks(_WHOLE)(states)

    def over(self, columns: slice, states: Tensor) -> Tensor:
        """The part of the map that belongs to some of its inputs, without the bias.

        Args:
            columns: Which inputs.
            states: These alone, `[..., columns]`.

        Returns:
            `[..., out]`; over all inputs these sum to the map without its bias.
        """
        return self._blocks(columns)(states)

    def _blocks(self, columns: slice) -> "Blocks":
        # Neither a submodule nor a part of the state.
        made: dict[tuple[Any, Any], Blocks] = self.__dict__.setdefault("_made", {})
        key = columns.start, columns.stop
        if key not in made:
            made[key] = Blocks([self], columns)
        return made[key]


class Blocks:
    """One or more linear maps of the same input, their outputs side by side.

    The maps are borrowed: a change of a weight or bias that `Seen` notices is seen at the next call.

    Args:
        maps: Each with `weight` `[out, in]` and `bias` `[out]` or None, as `nn.Linear` has them.
        columns: Which of their inputs are given; with some alone, biases are left out.
    """

    def __init__(self, maps: Sequence[Any], columns: slice = _WHOLE) -> None:
        self._maps: list[Any] = list(maps)
        self._columns = columns
        self._made_of: Seen | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, the sum of all `out`."""
        weights = [part.weight for part in self._maps]
        if not _can_lay_out(weights[0], states):
            outputs = [functional.linear(states, *self._part(index)) for index in range(len(weights))]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        watched = [*weights, *(part.bias for part in self._maps if part.bias is not None)]
        if self._made_of is None or not self._made_of.is_of(watched):
            self._lay_out()
            self._made_of = Seen(watched)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")
        return out

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files: the maps alone, the blocks to be made anew."""
        return {**self.__dict__, "_made_of": None, "_weight": None, "_bias": None}

    def _part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a map, as far as its columns are asked for."""
        part = self._maps[index]
        return (part.weight, part.bias) if self._columns == _WHOLE else (part.weight[:, self._columns], None)

    def _lay_out(self) -> None:
        """Makes the blocks."""
        parts = [self._part(index) for index in range(len(self._maps))]
        weights = [weight.detach() for weight, _ in parts]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        biases = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias.detach() for weight, bias in parts
        ]
        self._bias = None if all(bias is None for _, bias in parts) else torch.cat(biases)


class Joined:
    """Maps of the same input, multiplied at once where blocks are used and they are nothing but maps."""

    def __init__(self) -> None:
        self._blocks: Blocks | None = None
        self._maps: tuple[Linear, ...] = ()

    def __call__(self, maps: Sequence[Linear], states: Tensor) -> Tensor:
        """Multiplies.

        Args:
            maps: The maps, looked up by whoever holds them: where one of them was replaced, the blocks are
                made anew, and one that is more than a map (adapted, hooked) is called itself.
            states: `[..., in]`.

        Returns:
            Their outputs side by side, `[..., the sum of all out]`.
        """
        if not all(map(is_just_a_map, maps)):
            return torch.cat([part(states) for part in maps], dim=-1)
        if self._blocks is None or self._maps != tuple(maps):
            self._maps, self._blocks = tuple(maps), Blocks(maps)
        return self._blocks(states)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling a module does more than what its class says, or something else.

    Args:
        module: Any.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_just_a_map(part: nn.Module) -> bool:
    """Whether a map may be multiplied by its weight in place of being called.

    Args:
        part: Meant as a `Linear`.

    Returns:
        False for what was put in its place, adapted or hooked.
    """
    return type(part) is Linear and not is_hooked(part)


def is_laid_out(weight: Tensor) -> bool:
    """Whether maps decode over blocks of such a weight, and hold it twice then.

    Args:
        weight: The weight.

    Returns:
        Whether blocks are known to be faster: in float32 the library's own path is, for a single row.
    """
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _can_lay_out(weight: Tensor, states: Tensor) -> bool:
    """Whether this call goes over blocks."""
    return (
        not torch.compiler.is_compiling()  # which lays weights out itself
        and torch.is_inference_mode_enabled()
        and weight.dtype == states.dtype
        and is_laid_out(weight)
    )


class Seen:
    """Weights as they were when something was made of them.

    A weight that is replaced, or changed in place, is noticed. A change through `weight.data` is not, nor one
    of a weight that was made in inference mode: torch counts neither.

    Args:
        weights: The weights. Their memory is held, so that no other comes to lie where one of them lay.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        # `weight.data` may come to be other memory, which a view does not follow.
        self._held = [(weight, weight.detach()) for weight in weights]
        self._states = [_state(weight) for weight in weights]

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Whether these are the weights, and still what they were."""
        return self._states == [_state(weight) for weight in weights]


def _state(weight: Tensor) -> tuple[int, int]:
    """Where a weight lies, and how often it was changed as far as that is counted."""
    try:
        return weight.data_ptr(), weight._version
    except RuntimeError:  # made in inference mode
        return weight.data_ptr(), 0
