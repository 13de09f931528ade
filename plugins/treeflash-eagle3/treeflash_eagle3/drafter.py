"""The EAGLE-3 drafter: a one-layer head that drafts token by token, as a tree.

Source: EAGLE-3 (Li et al. 2025, arXiv:2503.01840).
"""

from pathlib import Path
from typing import ClassVar, Self

import attrs
import torch
from attrs.validators import ge, gt, optional
from torch import Tensor
from transformers import LlamaConfig

from treeflash.checkpoints.networks import placed, sized
from treeflash.checkpoints.reader import SHOWN_FAULTS, Checkpoint, weight_misfits
from treeflash.errors import CheckpointError, bullet_list
from treeflash.interfaces import BuildContext, Drafter
from treeflash.room import rows_to_make
from treeflash.target_interface import Target
from treeflash.types import DraftHead, Limits
from treeflash_eagle3.expansion import Expansion
from treeflash_eagle3.layout import Eagle3Facts, read_facts, vocabulary_faults
from treeflash_eagle3.network import Eagle3Network
from treeflash_eagle3.state import Eagle3State

CHILDREN = 10
# The published trees: one level from the anchor and 7 expansions.
MAX_DEPTH = 8


@attrs.frozen
class Eagle3Options:
    """What a recipe says of the drafter.

    Attributes:
        checkpoint: Folder or hub name of an EAGLE-3 checkpoint.
        children: Children drafted below a node, the likeliest.
        max_depth: Levels it can draft.
        rope_theta: Base of the head's rotary positions, for a checkpoint whose config does not name the one
            it was trained with; the config's when not given.
    """

    checkpoint: str
    children: int = attrs.field(default=CHILDREN, validator=ge(1))
    max_depth: int = attrs.field(default=MAX_DEPTH, validator=ge(1))
    rope_theta: float | None = attrs.field(default=None, validator=optional(gt(0)))


@attrs.define(eq=False)
class Eagle3(Drafter):
    """Drafts level by level: each node from its token and what the head made of its parent.

    Attributes:
        network: The weights.
        facts: What the checkpoint says of itself.
        children: Children drafted below a node.
        max_depth: Levels it can draft.
    """

    Options: ClassVar[type | None] = Eagle3Options
    drafts_blocks: ClassVar[bool] = False

    network: Eagle3Network
    facts: Eagle3Facts
    children: int = CHILDREN
    max_depth: int = MAX_DEPTH
    _target: Target | None = attrs.field(default=None, init=False)

    @classmethod
    def from_options(cls, options: Eagle3Options, context: BuildContext) -> Self:
        """Reads the checkpoint that a recipe names."""
        return cls.from_checkpoint(
            context.locate(options.checkpoint),
            context.target,
            children=options.children,
            max_depth=options.max_depth,
            rope_theta=options.rope_theta,
        )

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path | str,
        target: Target,
        *,
        children: int = CHILDREN,
        max_depth: int = MAX_DEPTH,
        rope_theta: float | None = None,
    ) -> Self:
        """Reads a checkpoint for a target.

        Args:
            folder: With `config.json` and safetensors, in the EAGLE-3 layout.
            target: The target it will draft for.
            children: Children drafted below a node.
            max_depth: Levels it can draft.
            rope_theta: Base of the rotary positions in place of the config's.

        Returns:
            The drafter, in the target's dtype on its device.

        Raises:
            CheckpointError: Listing everything that does not fit.
        """
        checkpoint = Checkpoint.open(Path(folder))
        facts, faults = read_facts(checkpoint.config, target.fingerprint())
        if facts is None:
            raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults))
        sizes = dict(facts.network)
        if rope_theta is not None:
            sizes["rope_parameters"] = {**sizes["rope_parameters"], "rope_theta": rope_theta}
        network = sized(
            checkpoint,
            lambda: Eagle3Network(LlamaConfig(**sizes), facts.draft_vocab_size, facts.vocab_size),
            faults,
        )
        misplaced = checkpoint.load(network, "backbone")
        if not misplaced:
            misplaced = vocabulary_faults(network.target_ids(), network.t2d, target.vocab_size)
        faults += misplaced
        if faults:
            raise CheckpointError(bullet_list(f"{checkpoint.folder}", faults, most=SHOWN_FAULTS))
        network = placed(checkpoint, network, target)
        return cls(network, facts, children, max_depth)

    @property
    def tap_layers(self) -> tuple[int, ...]:  # type: ignore[override]  # the checkpoint says which
        """The layers whose outputs are fused."""
        return self.facts.target_layer_ids

    def bind(self, target: Target) -> None:
        """Takes the target's embedding for its own."""
        faults = self.facts.misfits(target.fingerprint()) + weight_misfits(self.network, target)
        if faults:
            raise CheckpointError(bullet_list("the drafter was made for another target", faults))
        self._target = target

    def start(self, batch_size: int, capacity: int) -> Eagle3State:
        """Makes an empty context."""
        config, weight = self.network.config, self.network.fc.weight
        heads, width, rows = config.num_key_value_heads, config.head_dim, rows_to_make(0, 0, capacity + 1)
        return Eagle3State(
            states=weight.new_zeros(batch_size, rows, config.hidden_size),
            cache=weight.new_zeros(2, batch_size, heads, rows, width),
            lengths=torch.zeros(batch_size, dtype=torch.int64),
        )

    def extend(self, state: Eagle3State, token_ids: Tensor, taps: Tensor | None, counts: Tensor) -> None:
        """Writes keys and values of the new tokens beside the states before them.

        The layer's output is not needed there: nothing but the head reads it, and with a single layer keys
        and values do not depend on it.
        """
        assert taps is not None, "the engine taps what tap_layers asks for"
        state.make_room_for_text(token_ids.shape[1])
        at = batch, rows = state.rows(token_ids.shape[1])
        state.states[batch, rows + 1] = self.network.fc(taps)
        embedded = self._bound().embed(token_ids)
        joined = self.network.join(embedded, state.states[batch, rows])
        rotary = self.network.rotary(embedded, (rows - 1).clamp(min=0))
        state.write(at, *self.network.keys_values(joined, rotary))
        state.lengths = state.lengths + counts

    def rewind(self, state: Eagle3State, lengths: Tensor) -> None:
        """Drops the rows from `lengths` on."""
        state.lengths = torch.minimum(state.lengths, lengths)

    def propose(self, state: Eagle3State, recent: Tensor, limits: Limits) -> Expansion:
        """Runs the head over the anchor; the levels follow as they are asked for."""
        target = self._bound()
        anchor = recent[:, 1]
        at = batch, rows = state.rows(1)
        embedded, states = target.embed(anchor[:, None]), state.states[batch, rows]
        joined, rotary = self.network.join(embedded, states), self.network.rotary(embedded, rows - 1)
        state.write(at, *self.network.keys_values(joined, rotary))
        seen = torch.arange(int(state.lengths.max()) + 1, device=rows.device)
        visible = ((seen > 0) & (seen <= rows))[:, None, None]
        cache = state.cache[:, :, :, : len(seen)]
        head = DraftHead(
            embed=target.embed,
            norm=self.network.norm,
            project=self.network.lm_head,
            vocab_size=self.facts.draft_vocab_size,
        )
        return Expansion(
            anchor=anchor,
            depth=min(self.max_depth, limits.depth),
            network=self.network,
            head=head,
            state=state,
            # A tree of n nodes takes none but the n likeliest children of a node.
            width=min(self.children, limits.nodes),
            outputs=self.network(states, joined, rotary, *cache, visible),
        )

    def _bound(self) -> Target:
        assert self._target is not None, "bind comes first"
        return self._target
