"""A target that knows its text: drafts are simulated along it without running the model again."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from treeflash.target import HuggingFaceTarget
from treeflash.target_interface import identity
from treeflash.tree import TokenTree
from treeflash.types import TargetOutput


class Replay:
    """Stands for a target that writes one text, whatever is drafted.

    It answers from states that were read once. A decoder with it in the target's place takes the steps that
    it would take with the target, as long as the target would write this text.

    Args:
        target: The target that wrote it.
        token_ids: int64 `[n]` on the target's device: prompt and answer.
        states: By layer, `[n, D]`: the outputs that drafters tap.
    """

    def __init__(self, target: HuggingFaceTarget, token_ids: Tensor, states: Mapping[int, Tensor]) -> None:
        self._target, self._states = target, states
        self._ids = token_ids.tolist()
        self._length = 0
        self._layers: tuple[int, ...] = ()

    @classmethod
    def read(cls, target: HuggingFaceTarget, token_ids: Tensor, layers: Sequence[int]) -> "Replay":
        """Reads a text once.

        Args:
            target: The target that wrote it.
            token_ids: int64 `[n]` on the target's device: prompt and answer.
            layers: Layers that the drafter reads; there may be none.

        Returns:
            A stand-in that writes this text.
        """
        wanted = sorted(set(layers))
        if not wanted:
            return cls(target, token_ids, {})
        where = torch.arange(len(token_ids), device=token_ids.device)
        outputs = target.read(token_ids, where, where[:, None] >= where, wanted)
        states = torch.split(outputs, target.hidden_size, dim=-1)
        return cls(target, token_ids, dict(zip(wanted, states, strict=True)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def identity(self) -> object:
        """That of the target it stands for."""
        return identity(self._target)

    def start(self, batch_size: int, capacity: int, tap_layers: Sequence[int]) -> "Replay":
        """Begins anew."""
        self._length, self._layers = 0, tuple(tap_layers)
        return self

    def prefill(self, state: Any, token_ids: Tensor) -> TargetOutput:
        """Reads the prompt, which the text begins with."""
        self._length = token_ids.shape[1]
        return TargetOutput(self._sure([self._length - 1]), self._taps(list(range(self._length))))

    def verify(self, state: Any, tree: TokenTree) -> TargetOutput:
        """Chooses the text's next token at every node that is on its way, and anything at the others."""
        tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()
        depths, count = tree.depths[0].tolist(), int(tree.num_nodes[0])
        last = len(self._ids) - 1
        places, on_way = [], [False] * tree.size
        for node in range(tree.size):
            place = min(self._length + depths[node], last) if node < count else last
            comes = node == 0 or (node < count and on_way[parents[node]])
            on_way[node] = comes and tokens[node] == self._ids[place]
            places.append(place if on_way[node] else last)
        return TargetOutput(self._sure(places), self._taps(places))

    def commit(self, state: Any, paths: Sequence[Sequence[int]]) -> None:
        """Moves on."""
        self._length += len(paths[0])

    def _sure(self, places: Sequence[int]) -> Tensor:
        """Logits that leave no doubt: those behind each place, `[1, n, V]`; behind the text, token 0."""
        following = [self._ids[place + 1] if place + 1 < len(self._ids) else 0 for place in places]
        device = self._target.device
        scores = torch.zeros(len(places), self._target.vocab_size, dtype=torch.int8, device=device)
        return scores.scatter_(1, torch.tensor(following, device=device)[:, None], 1)[None]

    def _taps(self, places: Sequence[int]) -> Tensor | None:
        if not self._layers:
            return None
        where = torch.tensor(places, device=self._target.device)
        return torch.cat([self._states[layer][where] for layer in self._layers], dim=-1)[None]
