"""What a step computes and moves, counted operation by operation beside the time it takes."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from treeflash.engine import Decoder
from treeflash.engine.stopwatch import Stopwatch

# Operations that read few rows of a large tensor.
_LOOKUPS = ("embedding", "index", "index_select", "gather")


@attrs.frozen
class Work:
    """What some operations did.

    Attributes:
        flops: Of matrix products and attention.
        bytes: Read and written, as if nothing stayed in a cache.
        calls: Operations that compute or move anything: on a GPU, kernels at least.
    """

    flops: int = 0
    bytes: int = 0
    calls: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.calls + other.calls)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operation that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        known = func._overloadpacket in flop_registry or _own_flops(func, args) is not None
        if not known:
            with self:
                made = func.decompose(*args, **named)
            if made is not NotImplemented:
                return made
        out = func(*args, **named)
        if not func.is_view:
            self.work += Work(_flops(func, args, named, out), _bytes(func, args, named, out), 1)
        return out


class _WorkWatch(Stopwatch):
    """Counts by stage, as the stopwatch takes times."""

    def __init__(self, device: torch.device, counter: _Counter) -> None:
        super().__init__(device, synchronise=False)
        self._counter = counter
        self.stages: dict[str, Work] = {}

    def start(self) -> None:
        super().start()
        self._counter.work = Work()

    def lap(self, stage: str) -> None:
        super().lap(stage)
        self.stages[stage] = self.stages.get(stage, Work()) + self._counter.work
        self._counter.work = Work()


def count_work(decoder: Decoder, token_ids: list[int], **settings: Any) -> dict[str, Work]:
    """Decodes a text under a counter.

    Args:
        decoder: The decoder.
        token_ids: The prompt.
        **settings: As in `Decoder.generate`.

    Returns:
        By stage, the work of an average step.
    """
    counter = _Counter()
    watch = _WorkWatch(decoder.target.device, counter)
    # What a compiled pass does is not seen from outside.
    with torch.compiler.set_stance("force_eager"), counter:
        made = decoder.generate(token_ids, watch=watch, **settings)
    steps = max(1, len(made.statistics.steps))
    return {
        stage: Work(work.flops // steps, work.bytes // steps, work.calls // steps)
        for stage, work in watch.stages.items()
    }


def _own_flops(func: Any, args: tuple[Any, ...]) -> int | None:
    """Of operations that the library has no formula for."""
    name = func._overloadpacket._qualified_op_name
    if name == "mkldnn::_linear_pointwise":
        states, weight = args[:2]
        return 2 * int(states.numel()) * int(weight.shape[0])
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":
        queries, keys = args[:2]
        return 4 * int(queries.numel()) * int(keys.shape[-2])
    return None


def _flops(func: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> int:
    own = _own_flops(func, args)
    if own is not None:
        return own
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **named, out_val=out))


def _bytes(func: Any, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> int:
    written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    read = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    if func._overloadpacket.__name__ in _LOOKUPS:
        read = [*written, *read[1:]]
    return sum(part.numel() * part.element_size() for part in (*read, *written))
