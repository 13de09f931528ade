"""A model that is borrowed: as it was wrapped, by one thread at a time, and given back as it was."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from treeflash.errors import UnsupportedTargetError

# All targets of a model need the same lock, and nothing may be written into a model: an owner would find
# it there, and could not save or copy it. So locks are kept here, each as long as its model.
_locks: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_guard = threading.Lock()


class Loan:
    """A model on loan.

    Args:
        model: The model.
        decoder: It without its head.
        attention: The attention implementation that it is read with.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module, attention: str) -> None:
        self._model, self._decoder = model, decoder
        self._attention = attention
        self._weights = _weights(model)

    @property
    def lock(self) -> Any:
        """Held by whoever changes the model for a moment; all targets that share the decoder share it.

        A thread that holds it can take it again.
        """
        with _guard:
            return _locks.setdefault(self._decoder, threading.RLock())

    def check(self) -> None:
        """Makes sure that the weights are of the dtype, device and shape that they were wrapped with.

        Weights that have come or gone since, with an adapter for instance, are not compared.

        Raises:
            UnsupportedTargetError: When one is not.
        """
        now = _weights(self._model)
        for name, before in self._weights.items():
            if now.get(name, before) != before:
                raise UnsupportedTargetError(
                    f"{type(self._model).__name__} has changed since it was wrapped: {name} was "
                    f"{_spelled(*before)} and is {_spelled(*now[name])}; wrap it again (wrap_model) and load "
                    "the parts for the new target, or change it back"
                )

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Switches the model to evaluation and to masked attention, and back at the end.

        Other threads that want the same wait.
        """
        config: Any = self._decoder.config
        with self.lock:
            attention = config._attn_implementation
            training = [module for module in self._model.modules() if module.training]
            try:
                for module in training:
                    module.training = False
                if attention != self._attention:
                    config._attn_implementation = self._attention
                yield
            finally:
                for module in training:
                    module.training = True
                if attention != self._attention:
                    config._attn_implementation = attention


def _weights(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {name: (weight.dtype, weight.device, weight.shape) for name, weight in model.named_parameters()}


def _spelled(dtype: Any, device: Any, shape: Any) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
