"""A decoder: six parts that fit together, and the loop over them."""

import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from treeflash.components.drafters.none import NoDrafter
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.engine.answering import text_pieces
from treeflash.engine.binding import bound
from treeflash.engine.generation import Emission, Generation
from treeflash.engine.step import commit, planned, speculate
from treeflash.engine.stopping import StopRule
from treeflash.engine.stopwatch import Stopwatch
from treeflash.errors import CompositionError, InputError, first_line
from treeflash.interfaces import INTERFACES, Drafter, Refiner, Selector, TreeBuilder, Verifier
from treeflash.layouts import blocks_of, recheck
from treeflash.ranges import MOST_NODES
from treeflash.returned import named, spell_value
from treeflash.sampling import Draws
from treeflash.statistics import Statistics, StepRecord
from treeflash.target_interface import Target
from treeflash.types import DecodeState, Limits

# Integers of every width; some have no arithmetic, and are read as int64.
_INTEGERS = {
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
}


@attrs.define(eq=False, repr=False)
class Decoder:
    """Decodes a target through trees; the text is the target's own, unless the verifier is lossy on purpose.

    Attributes:
        target: Whose text is wanted.
        drafter: Guesses how it goes on; without one, decoding is plain.
        builder: Lays out contexts; needed behind a drafter of blocks, and only there.
        refiner: Corrects the draft; needed behind a drafter of blocks, and only there.
        selector: Chooses the tree.
        verifier: Accepts a path of it.

    Raises:
        CompositionError: When the parts do not fit together, or the drafter or refiner is bound to the target
            of another decoder that still exists; decoders of one model can share them.
        CheckpointError: When a part was made for another target.
        UnsupportedTargetError: When the drafter reads states of layers that give none.
    """

    target: Target
    drafter: Drafter = attrs.field(factory=NoDrafter)
    builder: TreeBuilder | None = None
    refiner: Refiner | None = None
    selector: Selector = attrs.field(factory=OptTree)
    verifier: Verifier = attrs.field(factory=SdpaTree)

    def __attrs_post_init__(self) -> None:
        self._check_kinds()
        parts = {"drafter": self.drafter, "builder": self.builder, "refiner": self.refiner}
        used: dict[str, type[Any]] = {kind: type(part) for kind, part in parts.items() if part is not None}
        names = {kind: component.__name__ for kind, component in used.items()}
        faults = [f"{kind}: {fault}" for kind, fault in misfits(used, names).items()]
        if not isinstance(getattr(self.drafter, "max_depth", None), int):
            faults.append(f"drafter {names['drafter']} does not say its max_depth")
        if faults:
            raise CompositionError("; ".join(faults))
        with bound(self, self.target, {"drafter": self.drafter, "refiner": self.refiner}):
            if self.drafter.tap_layers:  # known by now
                self.target.check_taps(self.drafter.tap_layers)

    @property
    def lossless(self) -> bool:
        """Whether the text is the target's own; its verifier may give that up on purpose."""
        return self.verifier.lossless

    def _check_kinds(self) -> None:
        """Refuses what is no part at all, before anything is asked of it."""
        faults = [
            f"{kind}: expected {named(base)}, found {spell_value(part)}"
            for kind, base in INTERFACES.items()
            for part in [getattr(self, kind)]
            if not isinstance(part, base) and not (part is None and kind in ("builder", "refiner"))
        ]
        if not all(hasattr(self.target, name) for name in ("start", "prefill", "verify")):
            faults.insert(
                0,
                "target: expected what load_target(name) or wrap_model(model) returns, found "
                f"{spell_value(self.target)}",
            )
        if faults:
            raise CompositionError("; ".join(faults))

    def __repr__(self) -> str:
        parts = {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}
        names = [f"{name}={type(part).__name__}" for name, part in parts.items() if part is not None]
        return f"Decoder({', '.join(names)})"

    def generate(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        sequence: int = 0,
        stop_ids: Sequence[int] | None = None,
        time_stages: bool = False,
        watch: Stopwatch | None = None,
        on_emission: Callable[[Emission], None] | None = None,
    ) -> Generation:
        """Decodes to the end.

        Args:
            token_ids: The prompt: token ids, or int64 `[S]` or `[1, S]`.
            max_new_tokens: Tokens to write at most.
            temperature: 0 takes the likeliest token; above, tokens are sampled.
            seed: Of the draws. The same seed gives the same text, whatever is drafted.
            sequence: Number of this text under that seed.
            stop_ids: Tokens that end the text; the target's own when not given.
            time_stages: Wait for the GPU behind each stage, so that its time is known. On a CPU it
                always is.
            watch: Measures the stages in place of one that is made for it.
            on_emission: Called with what each step adds, as it comes.

        Returns:
            The text and its statistics.

        Raises:
            InputError: For a prompt or setting that cannot be decoded.
        """
        prompt = self._prompt(token_ids)
        tokens: list[int] = []
        records: list[StepRecord] = []
        prefill = decode = 0.0
        reason = ""
        for emission in self.stream(
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            sequence=sequence,
            stop_ids=stop_ids,
            time_stages=time_stages,
            watch=watch,
        ):
            if on_emission is not None:
                on_emission(emission)
            tokens += emission.token_ids
            reason = emission.stop_reason or reason
            if emission.record is None:
                prefill = emission.seconds
            else:
                decode += emission.seconds
                records.append(emission.record)
        return Generation(
            token_ids=tokens,
            prompt_tokens=prompt.shape[1],
            stop_reason=reason,
            statistics=Statistics(records, prefill, decode),
        )

    def stream(
        self,
        token_ids: Sequence[int] | Tensor,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
        sequence: int = 0,
        stop_ids: Sequence[int] | None = None,
        time_stages: bool = False,
        watch: Stopwatch | None = None,
    ) -> Iterator[Emission]:
        """Decodes step by step.

        Args:
            token_ids: As in `generate`.
            max_new_tokens: As in `generate`.
            temperature: As in `generate`.
            seed: As in `generate`.
            sequence: As in `generate`.
            stop_ids: As in `generate`.
            time_stages: As in `generate`.
            watch: As in `generate`.

        Returns:
            First the token that the prefill gives, then what each step adds.

        Raises:
            InputError: For a prompt or setting that cannot be decoded.
        """
        prompt = self._prompt(token_ids)
        rule = self._stop_rule(prompt, max_new_tokens, stop_ids)
        draws = Draws(temperature, seed, (sequence,))
        if watch is None:
            watch = Stopwatch(self.target.device, synchronise=time_stages)
        return self._run(prompt, rule, draws, watch)

    def answer(self, *turns: str, raw: bool = False, **settings: Any) -> str:
        """Answers in words.

        Args:
            *turns: What the user says; with more than one, the answers stand between the user's turns.
            raw: Continue the one turn as it is, without the chat template.
            **settings: As `stream` takes them: `max_new_tokens`, `temperature`, `seed` and so on.

        Returns:
            The answer, without special tokens.

        Raises:
            InputError: For a prompt or setting that cannot be decoded, or a target without a tokenizer.
        """
        return "".join(self.answer_stream(*turns, raw=raw, **settings))

    def answer_stream(self, *turns: str, raw: bool = False, **settings: Any) -> Iterator[str]:
        """Answers in words, as they come.

        Args:
            *turns: As in `answer`.
            raw: As in `answer`.
            **settings: As in `answer`.

        Returns:
            Pieces of the answer, never half a character.

        Raises:
            InputError: As `answer` does, when the first piece is asked for.
        """
        return text_pieces(self.target, self.stream, *turns, raw=raw, **settings)

    def _run(self, prompt: Tensor, rule: StopRule, draws: Draws, watch: Stopwatch) -> Iterator[Emission]:
        """The loop."""
        begin = time.perf_counter()
        most = Limits(MOST_NODES, self.drafter.max_depth)
        room = planned(self.selector, (), most).nodes if most.depth else 0
        state, tokens = self._prefill(prompt, prompt.shape[1] + rule.limit + room + 1, draws)
        emitted, reason = rule.clip(tokens, 0)
        yield Emission(emitted, None, [], None, reason, time.perf_counter() - begin)

        have, steps = len(emitted), list[StepRecord]()
        while reason is None:
            begin = time.perf_counter()
            watch.start()
            # The bonus token needs no draft: one level less than can still be emitted.
            depth = min(self.drafter.max_depth, rule.limit - have - 1)
            limits = Limits(room, depth, int(state.lengths.max()))
            tree, acceptance, tried = speculate(self, state, draws, steps, limits, watch)
            emitted, reason = rule.clip(acceptance.tokens[0], have)
            if reason is None:
                commit(self, state, acceptance, watch)
            have += len(emitted)
            spent = time.perf_counter() - begin
            steps.append(
                StepRecord(
                    num_drafted=acceptance.num_drafted[0],
                    tree_depth=acceptance.depths[0],
                    num_accepted=min(acceptance.num_accepted[0], len(emitted)),
                    num_emitted=len(emitted),
                    seconds=watch.take(),
                    total=spent,
                    tried=tried,
                    expected=None if acceptance.expected is None else acceptance.expected[0],
                )
            )
            yield Emission(emitted, tree, acceptance.paths[0], steps[-1], reason, spent)

    def _prompt(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        if isinstance(token_ids, Mapping):
            raise InputError(f"expected token ids, found a mapping of {', '.join(map(str, token_ids))}")
        if isinstance(token_ids, str | bytes):
            raise InputError(
                f"expected token ids, found the text {token_ids!r}; "
                "decoder.target.text.encode_chat(...) turns a text into token ids"
            )
        try:
            prompt = torch.as_tensor(token_ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"token ids must be one row of integers ({first_line(error)})") from None
        if prompt.ndim == 1:
            prompt = prompt[None]
        if prompt.ndim != 2 or prompt.shape[0] != 1:
            raise InputError(
                f"one sequence at a time is decoded; expected token ids of shape [S] or [1, S], "
                f"found {list(prompt.shape)}"
            )
        if prompt.shape[1] == 0:
            raise InputError("the prompt is empty: expected at least one token to decode from")
        if prompt.dtype not in _INTEGERS:
            raise InputError(f"token ids must be integers, found {prompt.dtype}")
        if prompt.layout != torch.strided or prompt.is_meta:
            found = "one on the meta device" if prompt.is_meta else f"one of layout {prompt.layout}"
            raise InputError(f"token ids must be a dense tensor that stores numbers, found {found}")
        if prompt.dtype == torch.uint64 and bool((prompt.view(torch.int64) < 0).any()):
            raise InputError(f"token ids must be in 0..{self.target.vocab_size - 1}, found 2**63 or more")
        prompt = prompt.to(torch.int64)
        lowest, highest = int(prompt.min()), int(prompt.max())
        if lowest < 0 or highest >= self.target.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise InputError(f"token ids must be in 0..{self.target.vocab_size - 1}, found {wrong}")
        return prompt.to(self.target.device)

    def _stop_rule(self, prompt: Tensor, max_new_tokens: int, stop_ids: Sequence[int] | None) -> StopRule:
        if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be an integer >= 1, found {max_new_tokens!r}")
        limit = self.target.max_positions
        if limit is not None and prompt.shape[1] >= limit:
            raise InputError(
                f"the prompt has {prompt.shape[1]} tokens, and the target's {limit} positions leave no room "
                "for an answer"
            )
        stops = self.target.stop_ids if stop_ids is None else _token_ids(stop_ids)
        return StopRule.make(stops, prompt.shape[1], max_new_tokens, limit)

    @torch.inference_mode()
    def _prefill(self, prompt: Tensor, capacity: int, draws: Draws) -> tuple[DecodeState, list[int]]:
        """Reads the prompt, and chooses the first token."""
        target, drafter = self.target, self.drafter
        for part in (drafter, self.refiner):
            network = getattr(part, "network", None)
            if isinstance(network, nn.Module):
                recheck(blocks_of(network))
        state = DecodeState(
            recent=prompt[:, -1:],
            lengths=torch.tensor([prompt.shape[1]]),
            target=target.start(prompt.shape[0], capacity, drafter.tap_layers),
            drafter=drafter.start(prompt.shape[0], capacity),
        )
        output = target.prefill(state.target, prompt)
        # The last prompt token plays the root: the token behind it is chosen as behind any node.
        depths = torch.zeros_like(prompt[:, -1:])
        chosen = draws.choose(output.logits, state.lengths - 1, depths, 0)
        drafter.extend(state.drafter, prompt, output.taps, state.lengths)
        state.recent = torch.cat([prompt[:, -1:], chosen], dim=1)
        return state, chosen[:, 0].tolist()


def _token_ids(stop_ids: Iterable[int]) -> list[int]:
    """Stop ids as numbers: elements of a tensor are equal to them, and not found among them."""
    try:
        found = list(stop_ids)
        if not any(isinstance(token, bool) for token in found):
            return [operator.index(token) for token in found]
    except TypeError:
        pass
    raise InputError(f"stop_ids must be a list of token ids, found {stop_ids!r}")


def misfits(used: Mapping[str, type[Any]], names: Mapping[str, str]) -> dict[str, str]:
    """Says why a drafter, builder and refiner cannot stand behind one another.

    Args:
        used: Their classes by kind; "builder" and "refiner" are left out when there are none.
        names: What whoever chose them calls them, by kind.

    Returns:
        A sentence by the kind of the part at fault.
    """
    drafter = used["drafter"]
    called = f"drafter {names['drafter']}"
    if not drafter.drafts_blocks:
        return {
            kind: f"expected none, because {called} gives no hidden states to build on; found {names[kind]}"
            for kind in ("builder", "refiner")
            if kind in used
        }
    faults = {
        kind: f"expected one, because {called} drafts blocks; found none"
        for kind in ("builder", "refiner")
        if kind not in used
    }
    if not faults:
        history, builder = used["refiner"].history, used["builder"]
        if not builder.min_history <= history <= builder.max_history:
            served = sorted({builder.min_history, builder.max_history})
            faults["builder"] = (
                f"expected contexts of {history} token{'s' * (history != 1)}, which refiner "
                f"{names['refiner']} looks at; found {names['builder']}, which lays out contexts of "
                f"{' to '.join(map(str, served))}"
            )
    return faults
