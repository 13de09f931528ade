"""Linear maps over weights laid out for the processor they are on.

A CPU multiplies a few rows by a matrix no faster than it can read the matrix, and reads a matrix in its own
blocked layout up to twice as fast as one in rows. The blocks are made when a map is first used to decode, and
hold the weights a second time; maps that are joined with several others, once for each way. They are what
the weights are: a change that torch counts is seen at the next product, any other when `recheck` is called,
which decoding does before each text.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from treeflash.seen import Seen, checksums

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

    The maps are borrowed: a change of a weight or bias that `Seen` notices is seen at the next call, any
    other after `recheck`.

    Args:
        maps: Each with `weight` `[out, in]` and `bias` `[out]` or None, as `nn.Linear` has them.
        columns: Which of their inputs are given; with some alone, biases are left out.
    """

    def __init__(self, maps: Sequence[Any], columns: slice = _WHOLE) -> None:
        self._maps: list[Any] = list(maps)
        self._columns = columns
        self._made: _Made | None = None

    def __call__(self, states: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, the sum of all `out`."""
        weights = [part.weight for part in self._maps]
        if not _can_lay_out(weights[0], states):
            outputs = [functional.linear(states, *self._part(index)) for index in range(len(weights))]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        made = self._made
        if made is None or not made.of.is_of(self.watched()):
            made = self._made = self._lay_out()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(states, made.weight, made.bias, "none", [], "")
        return out

    @property
    def made(self) -> "_Made | None":
        """The blocks, while there are any."""
        return self._made

    def watched(self) -> list[Tensor]:
        """The weights and biases."""
        biases = (part.bias for part in self._maps if part.bias is not None)
        return [*(part.weight for part in self._maps), *biases]

    def forget(self) -> None:
        """Has the blocks made anew at the next call."""
        self._made = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies and files: the maps alone, the blocks to be made anew."""
        return {**self.__dict__, "_made": None}

    def _part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a map, as far as its columns are asked for."""
        part = self._maps[index]
        return (part.weight, part.bias) if self._columns == _WHOLE else (part.weight[:, self._columns], None)

    def _lay_out(self) -> "_Made":
        """Makes the blocks."""
        watched = self.watched()
        seen, sums = Seen(watched), checksums(watched)
        parts = [self._part(index) for index in range(len(self._maps))]
        weights = [weight.detach() for weight, _ in parts]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        biases = [
            weight.new_zeros(weight.shape[0]) if bias is None else bias.detach() for weight, bias in parts
        ]
        bias = None if all(bias is None for _, bias in parts) else torch.cat(biases)
        return _Made(seen, sums, laid_out, bias)


@attrs.frozen(eq=False)
class _Made:
    """Blocks, and what they were made of."""

    of: Seen
    sums: list[tuple[int, ...]]
    weight: Tensor
    bias: Tensor | None


def recheck(blocks: Iterable[Blocks]) -> None:
    """Forgets blocks whose weights have changed; all their bytes are compared.

    Args:
        blocks: Any; those that were not made cost nothing.
    """
    made = [(each, held, each.watched()) for each in blocks for held in [each.made] if held is not None]
    sums = iter(checksums([weight for _, _, watched in made for weight in watched]))
    for each, held, watched in made:
        if [next(sums) for _ in watched] != held.sums:
            each.forget()


def blocks_of(network: nn.Module) -> Iterator[Blocks]:
    """Lists the blocks that a network of `Linear` and `Joined` has made.

    Args:
        network: Any.

    Yields:
        Each of them.
    """
    for module in network.modules():
        for held in vars(module).values():
            if isinstance(held, Joined) and held.blocks is not None:
                yield held.blocks
        if isinstance(module, Linear):
            yield from vars(module).get("_made", {}).values()


class Joined:
    """Maps of the same input, multiplied at once where blocks are used and they are nothing but maps.

    Attributes:
        blocks: What they are multiplied by, once they were.
    """

    def __init__(self) -> None:
        self.blocks: Blocks | None = None
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
        if self.blocks is None or self._maps != tuple(maps):
            self._maps, self.blocks = tuple(maps), Blocks(maps)
        return self.blocks(states)


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
