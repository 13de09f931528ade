"""Any Hugging Face causal language model with key/value attention, as a target."""

import hashlib
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from treeflash.errors import InputError, UnsupportedTargetError
from treeflash.target.borrowing import Loan
from treeflash.target.cache import TreeCache
from treeflash.target.compiled import CompiledDecoder
from treeflash.target.config_facts import max_positions, rope_theta, stop_ids
from treeflash.target.lean import LeanDecoder
from treeflash.target.masks import additive_masks, layer_windows
from treeflash.target.reading import GatheredHead, Reading
from treeflash.target.refusals import check_model
from treeflash.target.taps import decoder_layers, find_decoder, tapped
from treeflash.target.text import TextCodec
from treeflash.target_interface import TargetFacts
from treeflash.tree import TokenTree
from treeflash.types import TargetOutput

# Longer prompts are read in pieces, so that the mask stays small.
_PREFILL_CHUNK = 1024


@attrs.define(eq=False)
class TargetState:
    """What the target remembers of its sequences.

    Attributes:
        cache: Keys and values.
        tap_layers: Layers whose outputs are read.
    """

    cache: TreeCache
    tap_layers: tuple[int, ...]


class HuggingFaceTarget(Reading):
    """A model read in trees; it is borrowed, and left as it was after every pass.

    Args:
        model: The model, on its device in its dtype. Its own forward is used, unless `lean` is set.
        tokenizer: Its tokenizer, for text; token ids do without.
        attention: The attention implementation to read trees with, "sdpa" or "eager".

    Attributes:
        decoder: The model without its head.
        tap_fault: Why the states of its layers cannot be read, if they cannot.
        lean: Reads prompts and trees in place of the model's own forward, when it is there.
        compiled: Reads in place of `lean`, when it is there.
        text_fault: Why no tokenizer could be loaded.
        loan: What keeps other threads' passes apart, and the model as it was wrapped.

    Raises:
        UnsupportedTargetError: When the model's interface or layers rule trees out. `wrap_model`
            checks the logits too.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, *, attention: str = "sdpa") -> None:
        check_model(model)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.config: Any = config
        self.text = None if tokenizer is None else TextCodec(tokenizer)
        self.text_fault: str | None = None
        self.attention = attention
        self.lean: LeanDecoder | None = None
        self.compiled: CompiledDecoder | None = None
        self._heads: WeakSet[GatheredHead] = WeakSet()
        self._aside: tuple[LeanDecoder | None, CompiledDecoder | None] = (None, None)
        self.decoder = find_decoder(model)
        self.loan = Loan(model, self.decoder, attention)
        with self.loan.lock:  # another thread that checks the model narrows them meanwhile
            self.windows: dict[str, int | None] = layer_windows(config)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._cache_name = _cache_name(self._parameters)
        if attention == "sdpa" and not getattr(self.decoder, "_supports_sdpa", True):
            raise UnsupportedTargetError("it has no SDPA path")
        devices = {str(weight.device) for weight in model.parameters()}
        if len(devices) > 1:
            raise UnsupportedTargetError(
                f"it is spread over {', '.join(sorted(devices))}; expected one device"
            )
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.dtype: torch.dtype = embedding.dtype
        self.vocab_size: int = min(embedding.shape[0], model.get_output_embeddings().weight.shape[0])
        self.hidden_size: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        self.max_positions: int | None = max_positions(config)
        self.stop_ids: tuple[int, ...] = stop_ids(model)
        self._rope_theta = rope_theta(config)
        self.layers = decoder_layers(self.decoder, self.num_layers)
        self.tap_fault: str | None = None
        if self.layers is None:
            self.tap_fault = f"no stack of {self.num_layers} decoder layers was found"

    @property
    def identity(self) -> PreTrainedModel:
        """The model: parts that are bound to one target of it can be bound to another."""
        return self.model

    def require_text(self) -> TextCodec:
        """The tokenizer.

        Raises:
            InputError: When the target came without one.
        """
        if self.text is None:
            reason = "" if self.text_fault is None else f" (none could be loaded: {self.text_fault})"
            raise InputError(f"the target comes without a tokenizer: expected one beside the model{reason}")
        return self.text

    def start(self, batch_size: int, capacity: int, tap_layers: Sequence[int]) -> TargetState:
        """Makes the state of new sequences (see `Target.start`).

        Raises:
            InputError: For more than one sequence, or a layer the model does not have.
            UnsupportedTargetError: When states of its layers cannot be read, or the model was cast, moved or
                resized since it was wrapped.
        """
        self.check_taps(tap_layers)
        if batch_size != 1:
            raise InputError(f"one sequence at a time is decoded; expected 1 row, found {batch_size}")
        self.loan.check()
        with self.loan.lock:  # another thread's pass hangs hooks into the model for a moment
            self._follow_changes()
            if self.compiled is not None and self.compiled.outdated:
                self.compiled.prepare(self._take_passes)
        return TargetState(TreeCache(self.num_layers, capacity, batch_size), tuple(tap_layers))

    def _follow_changes(self) -> None:
        """Looks at what may have become of the model since the last text."""
        for head in list(self._heads):
            head.recheck()
        lean, compiled = self._aside if self.lean is None else (self.lean, self.compiled)
        if lean is None:
            return
        # Where adapters or hooks have come into the model its own forward knows them; until they are gone.
        reads = lean.reads(self.model)
        if reads:
            lean.recheck()
        self._aside = (None, None) if reads else (lean, compiled)
        self.lean, self.compiled = (lean, compiled) if reads else (None, None)

    @torch.inference_mode()
    def _take_passes(self) -> None:
        """A pass over one row and one over several, as plain decoding and trees take them."""
        prompt = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        tree = TokenTree.from_lists([0, 0, 1], [-1, 0, 0], device=self.device)
        # No pass of the engine's fills a cache to its end, and graphs would be for those that do.
        state = TargetState(TreeCache(self.num_layers, prompt.shape[1] + tree.size + 1), ())
        self.prefill(state, prompt)
        for size in (1, tree.size):
            self.verify(state, tree.first(size))

    def prefill(self, state: TargetState, token_ids: Tensor) -> TargetOutput:
        """Reads a prompt, in pieces when it is long (see `Target.prefill`)."""
        taps, output = [], None
        state.cache.reserve(token_ids.shape[1])  # for all pieces, before the first is read
        for begin in range(0, token_ids.shape[1], _PREFILL_CHUNK):
            piece = token_ids[:, begin : begin + _PREFILL_CHUNK]
            start, count = state.cache.length, piece.shape[1]
            state.cache.reserve(count)
            keys = torch.arange(start + count, device=piece.device).expand(piece.shape[0], -1)
            queries = keys[:, start:]
            visible = keys[:, None, :] <= queries[:, :, None]
            output = self._forward(state, piece, queries, keys, visible, last_logits=True)
            state.cache.append(count)
            if output.taps is not None:
                taps.append(output.taps)
        if output is None:
            raise InputError("the prompt is empty: expected at least one token to decode from")
        return TargetOutput(output.logits, torch.cat(taps, dim=1) if taps else None)

    def verify(self, state: TargetState, tree: TokenTree, first: int = 0) -> TargetOutput:
        """Reads a tree behind the committed rows (see `Target.verify`).

        Args:
            state: From `start`.
            tree: The tree.
            first: Nodes from this one on are read. Those before it were, by the passes since the last
                commit, and their rows are where these left them: so a tree can grow level by level.

        Returns:
            Logits and taps of the nodes that were read.
        """
        start = state.cache.length
        state.cache.reserve(tree.size - first, behind=first)
        reader = self._reader
        if tree.size == 1 and reader is not None and not any(self.windows.values()):
            # Plain decoding: a root sees all that is committed, which needs no mask.
            at = torch.full_like(tree.token_ids, start)
            return self._read_leanly(reader, state, tree.token_ids, at, None, last_logits=False)
        # A node's position is that of its depth, wherever its row lies. Empty slots hold anything: they are
        # read as the root is, since the states of any other token might overflow.
        is_node = tree.is_node
        positions = start + tree.depths.masked_fill(~is_node, 0)
        queries = positions[:, first:]
        token_ids = torch.where(is_node, tree.token_ids, tree.token_ids[:, :1])[:, first:]
        cached = torch.arange(start, device=queries.device).expand(queries.shape[0], -1)
        keys = torch.cat([cached, positions], dim=1)
        among_nodes = tree.ancestor_mask()[:, first:]
        seen_cache = among_nodes.new_ones(1, 1, 1).expand(*queries.shape, start)
        visible = torch.cat([seen_cache, among_nodes], dim=2)
        return self._forward(state, token_ids, queries, keys, visible, last_logits=False)

    def digest(self) -> str:
        """A hash that tells models apart: of the names of all weights and a few values of each.

        Returns:
            16 hexadecimal digits, the same whether the model is loaded in float32, float64 or bfloat16.
        """
        found = hashlib.sha256()
        for name, weight in sorted(self.model.named_parameters()):
            values = weight.detach().flatten()[:: max(1, weight.numel() // 64)]
            found.update(f"{name} {tuple(weight.shape)}".encode())
            found.update(values.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
        return found.hexdigest()[:16]

    def commit(self, state: TargetState, paths: Sequence[Sequence[int]]) -> None:
        """Keeps the accepted rows (see `Target.commit`)."""
        (path,) = paths
        state.cache.keep(path)

    def rewind(self, state: TargetState, lengths: Tensor) -> None:
        """Forgets positions (see `Target.rewind`)."""
        state.cache.rewind(lengths)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeds token ids (see `Target.embed`)."""
        out: Tensor = self.model.get_input_embeddings()(token_ids)
        return out

    def project(self, normed: Tensor) -> Tensor:
        """Applies the output head alone (see `Target.project`)."""
        lean = self.lean
        head = self.model.get_output_embeddings() if lean is None else lean.head
        out: Tensor = head(normed)
        return out

    def fingerprint(self) -> TargetFacts:
        """Sizes that a drafter must agree with (see `Target.fingerprint`)."""
        return TargetFacts(
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            rope_theta=self._rope_theta,
        )

    @property
    def _reader(self) -> LeanDecoder | CompiledDecoder | None:
        """What reads in place of the model's own forward."""
        return self.compiled or self.lean

    @torch.no_grad()
    def _forward(
        self,
        state: TargetState,
        token_ids: Tensor,
        queries: Tensor,
        keys: Tensor,
        visible: Tensor,
        *,
        last_logits: bool,
    ) -> TargetOutput:
        """One pass with explicit positions and masks."""
        masks = additive_masks(self.windows, visible, queries, keys, self.dtype)
        reader = self._reader
        if reader is not None:
            return self._read_leanly(reader, state, token_ids, queries, masks, last_logits=last_logits)
        inputs: dict[str, Any] = {
            "input_ids": token_ids,
            "position_ids": queries,
            "attention_mask": masks,
            self._cache_name: state.cache,
            "use_cache": True,
            "return_dict": True,
        }
        if "logits_to_keep" in self._parameters:
            inputs["logits_to_keep"] = int(last_logits)
        with self.borrowed(), tapped(self.decoder, self.modules_of(state.tap_layers)) as outputs:
            logits = self.model(**inputs).logits
        taps = torch.cat(outputs, dim=-1) if outputs else None
        # A token that cannot be embedded cannot be gone on from.
        return TargetOutput(logits[:, -1 if last_logits else 0 :, : self.vocab_size], taps)

    @torch.no_grad()
    def _read_leanly(
        self,
        reader: LeanDecoder | CompiledDecoder,
        state: TargetState,
        token_ids: Tensor,
        positions: Tensor,
        masks: Tensor | dict[str, Tensor] | None,
        *,
        last_logits: bool,
    ) -> TargetOutput:
        logits, taps = reader(
            token_ids, positions, masks, state.cache, state.tap_layers, last_logits=last_logits
        )
        return TargetOutput(logits[..., : self.vocab_size], taps)

    def borrowed(self) -> AbstractContextManager[None]:
        """Switches the model to evaluation and to masked attention for a pass, while other threads wait."""
        return self.loan.borrowed()


def _cache_name(parameters: set[str]) -> str:
    """The forward's name for its cache; transformers is renaming it."""
    for name in ("cache", "past_key_values"):
        if name in parameters:
            if "position_ids" not in parameters:
                raise UnsupportedTargetError(
                    "its forward takes no position_ids: positions are counted by index in the cache (as "
                    "with ALiBi), where a tree's nodes do not stand in the order of their positions"
                )
            return name
    kept = "what is accepted cannot be kept, and every token is read again with each one that follows"
    if "state" in parameters:
        kept = "it keeps a recurrent state, which cannot branch"
    elif "mems" in parameters:
        kept = "it keeps hidden states (mems), in the order in which they were read"
    raise UnsupportedTargetError(f"its forward takes no key/value cache: {kept}")
