"""Passes of the target as compiled graphs.

One graph is made for a single row and one for any number of them, each for any length of the text: what
surrounds the matrix products is fused, and Python is left behind. That takes minutes, and on a CPU each graph
holds the weights once more.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, _inductor

from treeflash.errors import first_line
from treeflash.layouts import weight_state
from treeflash.target.cache import TreeCache
from treeflash.target.lean import LeanDecoder

# Longer pieces of a prompt are products above all.
_MOST_ROWS = 256
# Graphs of one pass: a row or more of them, and what changes besides, with room to spare.
_MOST_GRAPHS = 16

_Pass = Callable[
    [Tensor, Tensor, Tensor | Mapping[str, Tensor] | None, TreeCache], tuple[Tensor, Tensor | None]
]


class CompiledDecoder:
    """A `LeanDecoder` whose passes over trees are compiled when they are first taken.

    Where that fails they are taken as they are, after one warning.

    Args:
        lean: What is compiled.
    """

    def __init__(self, lean: LeanDecoder) -> None:
        self._lean = lean
        self._passes: dict[tuple[int, ...], _Pass] = {}
        self._made_of: list[tuple[int, int]] = []
        self.failed = False

    def refresh(self) -> None:
        """Compiles anew when weights have changed since: graphs on a CPU hold them."""
        made_of = [weight_state(weight) for weight in self._lean.weights()]
        if made_of != self._made_of:
            self._passes.clear()
            self._made_of = made_of

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
        """One pass, as `LeanDecoder` takes it; those over prompts are left to it."""
        if not (self.failed or last_logits or token_ids.shape[1] > _MOST_ROWS):
            taps = tuple(tap_layers)
            # Layouts of the weights for a CPU are chosen where graphs hold them.
            frozen = token_ids.device.type == "cpu"
            try:
                if taps not in self._passes:
                    self._passes[taps] = _compiled(self._lean, taps)
                with _inductor.config.patch(freezing=frozen):
                    return self._passes[taps](token_ids, positions, masks, cache)
            except Exception as error:
                # Whatever a compiler can raise: the pass itself needs none. Its rows are written again.
                self.failed = True
                reason = first_line(getattr(error, "inner_exception", error))
                warnings.warn(
                    f"target.compile: passes are not compiled ({reason})", RuntimeWarning, stacklevel=2
                )
        return self._lean(token_ids, positions, masks, cache, tap_layers, last_logits=last_logits)


def _compiled(lean: LeanDecoder, taps: tuple[int, ...]) -> _Pass:
    """The pass that gives all logits and some taps."""

    def passed(
        token_ids: Tensor, positions: Tensor, masks: Tensor | Mapping[str, Tensor] | None, cache: TreeCache
    ) -> tuple[Tensor, Tensor | None]:
        return lean(token_ids, positions, masks, cache, taps, last_logits=False)

    made: _Pass = torch.compile(  # type: ignore[call-overload]  # which lags behind the options there are
        passed, dynamic=True, fullgraph=True, recompile_limit=_MOST_GRAPHS, isolate_recompiles=True
    )
    return made
