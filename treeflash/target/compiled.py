"""Passes of the target as compiled graphs.

One graph is made for a single row and one for any number of them, each for any length of the text: what
surrounds the matrix products is fused, and Python is left behind. That takes the compiler half a minute a
layer, and on a CPU each graph holds the weights once more, until the process ends: torch's compiler keeps
what it made.
"""

import importlib
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treeflash.errors import first_line
from treeflash.seen import Seen, checksums
from treeflash.target.cache import TreeCache
from treeflash.target.lean import MOST_FOLDED, LeanDecoder

# For a single row, and for several.
GRAPHS = 2

_Pass = Callable[[Tensor, Tensor, Tensor | Mapping[str, Tensor] | None, TreeCache], tuple[Tensor, Tensor]]


class CompiledDecoder:
    """A `LeanDecoder` whose passes over trees are compiled, as far as it folds heads; others are left to it.

    Larger ones are prompts, and products above all. A change of weights is seen when `outdated` is asked.

    Args:
        lean: What is compiled.

    Attributes:
        failed: Whether compiling failed. Passes are then taken as they are.
    """

    def __init__(self, lean: LeanDecoder) -> None:
        self._lean = lean
        self._pass: _Pass | None = None
        self._made_of: tuple[Seen, list[tuple[int, ...]]] | None = None
        self._forget: Callable[[], Any] = lambda: None
        self.failed = False

    @property
    def outdated(self) -> bool:
        """Whether there are no graphs of the weights as they are now, and can be."""
        if self.failed:
            return False
        if self._made_of is None:
            return True
        weights, (seen, sums) = self._lean.weights(), self._made_of
        return not seen.is_of(weights) or checksums(weights) != sums

    def prepare(self, take_passes: Callable[[], object]) -> None:
        """Compiles.

        Args:
            take_passes: Takes a pass of each kind through this decoder.
        """
        # Few need the compiler, and it takes a second to import.
        dynamo: Any = importlib.import_module("torch._dynamo")
        inductor: Any = importlib.import_module("torch._inductor.config")
        shapes: Any = importlib.import_module("torch.fx.experimental._config")
        weights = self._lean.weights()
        self._made_of = Seen(weights), checksums(weights)
        self._forget()
        self._pass, code = _compiled(self._lean)
        # The compiler keeps graphs, and with them the weights, by code.
        self._forget = weakref.finalize(self, dynamo.reset_code, code)
        # On a CPU layouts of the weights are chosen for the processor, where graphs hold them.
        frozen = weights[0].device.type == "cpu"
        try:
            # Sizes that happen to be equal now are not always so.
            with inductor.patch(freezing=frozen), shapes.patch(use_duck_shape=False):
                take_passes()
        except Exception as error:  # whatever a compiler can raise: a pass itself needs none
            self._forget()
            self._pass = self._made_of = None
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.failed = True
            reason = first_line(getattr(error, "inner_exception", error))
            warnings.warn(f"target.compile: passes are not compiled ({reason})", RuntimeWarning, stacklevel=4)

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
        """One pass, as `LeanDecoder` takes it."""
        graph = self._pass
        # Graphs are made for inference mode.
        small = token_ids.shape[1] <= MOST_FOLDED and not last_logits
        if graph is None or not small or not torch.is_inference_mode_enabled():
            return self._lean(token_ids, positions, masks, cache, tap_layers, last_logits=last_logits)
        logits, outputs = graph(token_ids, positions, masks, cache)
        if not tap_layers:
            return logits, None
        layers = outputs.view(*outputs.shape[:2], len(cache.layers), -1)
        return logits, torch.cat([layers[:, :, layer] for layer in tap_layers], dim=-1)


def _compiled(lean: LeanDecoder) -> tuple[_Pass, types.CodeType]:
    """The pass that gives all logits and the outputs of all layers, and the code that it is kept by."""

    def written(
        token_ids: Tensor, positions: Tensor, masks: Tensor | Mapping[str, Tensor] | None, cache: TreeCache
    ) -> tuple[Tensor, Tensor | None]:
        return lean(token_ids, positions, masks, cache, range(len(cache.layers)), last_logits=False)

    # Code of its own: that of one target has nothing to do with another's.
    code = written.__code__.replace()
    own = types.FunctionType(code, written.__globals__, closure=written.__closure__)
    graph: _Pass = torch.compile(own, dynamic=True, fullgraph=True)
    return graph, code
