"""The DFlash drafter: all positions of a block in one pass, from the target's hidden states.

Source: DFlash (arXiv:2602.06036).
"""

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

import attrs
import torch
from attrs.validators import gt
from torch import Tensor
from transformers import Qwen3Config

from treeflash.checkpoints.dflash_layout import DFlashFacts, open_for
from treeflash.checkpoints.networks import placed, sized
from treeflash.checkpoints.reader import SHOWN_FAULTS, weight_misfits
from treeflash.checkpoints.shortlist import read_shortlist
from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.errors import CheckpointError, bullet_list
from treeflash.interfaces import BuildContext, Drafter
from treeflash.room import enlarged, rows_to_make
from treeflash.target_interface import Target
from treeflash.types import BlockDraft, DraftHead, Limits


@attrs.frozen
class DFlashOptions:
    """What a recipe says of the drafter.

    Attributes:
        checkpoint: Folder or hub name of a DFlash or TreeFlash checkpoint.
        temperature: Divides the draft logits.
        shortlist: Score only the tokens that the checkpoint lists, those it was trained on, if it lists any.
    """

    checkpoint: str
    temperature: float = attrs.field(default=1.0, validator=gt(0))
    shortlist: bool = True


@attrs.define(eq=False)
class DFlashState:
    """What the drafter remembers of its sequences.

    Attributes:
        cache: `[layers, 2, B, heads, rows, d]`: context keys and values, each written once.
        lengths: int64 `[B]` on the CPU: positions written.
        capacity: Rows that can ever be needed.
    """

    cache: Tensor
    lengths: Tensor
    capacity: int

    def starts(self) -> int | Tensor:
        """Where each row goes on: one number if all are as long."""
        first = int(self.lengths[0])
        return first if bool((self.lengths == first).all()) else self.lengths

    def make_room(self, rows: int) -> None:
        """Makes sure that the cache has so many rows behind the longest context."""
        length, have = int(self.lengths.max()), self.cache.shape[-2]
        if length + rows > have:
            self.cache = enlarged(self.cache, rows_to_make(length + rows, have, self.capacity), length)


@attrs.define(eq=False)
class DFlash(Drafter):
    """Drafts `block_size - 1` positions at once.

    Attributes:
        network: The weights.
        facts: What the checkpoint says of itself.
        temperature: Divides the draft logits.
        columns: int64 `[V']`, ascending: the tokens that are scored; None for all.
    """

    Options: ClassVar[type | None] = DFlashOptions

    network: DFlashNetwork
    facts: DFlashFacts
    temperature: float = 1.0
    columns: Tensor | None = None
    _target: Target | None = attrs.field(default=None, init=False)
    _project: Callable[[Tensor], Tensor] | None = attrs.field(default=None, init=False)

    @classmethod
    def from_options(cls, options: DFlashOptions, context: BuildContext) -> Self:
        """Reads the checkpoint that a recipe names."""
        folder = context.locate(options.checkpoint)
        return cls.from_checkpoint(
            folder, context.target, temperature=options.temperature, shortlist=options.shortlist
        )

    @classmethod
    def from_checkpoint(
        cls, folder: Path | str, target: Target, *, temperature: float = 1.0, shortlist: bool = True
    ) -> Self:
        """Reads a checkpoint's backbone for a target.

        Args:
            folder: With `config.json` and safetensors, in the DFlash or TreeFlash layout.
            target: The target it will draft for.
            temperature: Divides the draft logits.
            shortlist: As in the options.

        Returns:
            The drafter, in the target's dtype on its device.

        Raises:
            CheckpointError: Listing everything that does not fit.
        """
        checkpoint, facts, faults = open_for(folder, target)
        stored = checkpoint.num_layers()
        if stored < facts.network["num_hidden_layers"]:
            # Said before so many are made.
            found = facts.network["num_hidden_layers"]
            faults.append(f"num_hidden_layers: expected the {stored} whose tensors are stored, found {found}")
            raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults))
        network = sized(
            checkpoint,
            lambda: DFlashNetwork(Qwen3Config(**facts.network), len(facts.target_layer_ids)),
            faults,
        )
        faults += checkpoint.load(network, "backbone")
        columns = read_shortlist(checkpoint.folder, target.vocab_size, faults) if shortlist else None
        if faults:
            raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults, most=SHOWN_FAULTS))
        network = placed(checkpoint, network, target)
        return cls(network, facts, temperature, None if columns is None else columns.to(target.device))

    @property
    def tap_layers(self) -> tuple[int, ...]:  # type: ignore[override]  # the checkpoint says which
        """The checkpoint's `target_layer_ids`."""
        return self.facts.target_layer_ids

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # the checkpoint says how many
        """The block without its anchor."""
        return self.facts.block_size - 1

    def bind(self, target: Target) -> None:
        """Takes the target's embedding and head for its own."""
        faults = self.facts.misfits(target.fingerprint()) + weight_misfits(self.network, target)
        if faults:
            raise CheckpointError(bullet_list("the drafter was made for another target", faults))
        self._target = target
        self._project = target.project if self.columns is None else target.head(self.columns, target.dtype)

    def start(self, batch_size: int, capacity: int) -> DFlashState:
        """Makes an empty context, with room for one block behind the longest."""
        config = self.network.config
        heads, width = config.num_key_value_heads, config.head_dim
        layers, most = len(self.network.layers), capacity + self.facts.block_size
        weight = self.network.fc.weight
        cache = weight.new_empty(layers, 2, batch_size, heads, rows_to_make(0, 0, most), width)
        return DFlashState(cache, torch.zeros(batch_size, dtype=torch.int64), most)

    def extend(self, state: DFlashState, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """Writes the new positions' context."""
        assert taps is not None, "the engine taps what tap_layers asks for"
        state.make_room(taps.shape[1] + self.facts.block_size)
        self.network.write_context(taps, state.cache, state.starts())
        state.lengths = state.lengths + counts

    def rewind(self, state: DFlashState, lengths: Tensor) -> None:
        """Drops the context from `lengths` on."""
        state.lengths = torch.minimum(state.lengths, lengths)

    def propose(self, state: DFlashState, recent: Tensor, limits: Limits) -> BlockDraft:
        """Runs the backbone once; the whole block, since that is what it was trained on."""
        target, project = self._target, self._project
        assert target is not None, "bind comes first"
        assert project is not None, "bind comes first"
        masks = recent.new_full((recent.shape[0], self.max_depth), self.facts.mask_token_id)
        block = target.embed(torch.cat([recent[:, 1:], masks], dim=1))
        hidden, normed = self.network(block, state.cache, state.starts())
        # Slot i predicts the token at slot i; slot 0 is the anchor itself.
        used = slice(1, 1 + min(self.max_depth, limits.depth))
        head = DraftHead(
            embed=target.embed,
            norm=self.network.norm,
            project=project,
            vocab_size=target.vocab_size,
            columns=self.columns,
            rows=target.head_rows,
            temperature=self.temperature,
        )
        return BlockDraft(recent, hidden[:, used], normed[:, used], head)
