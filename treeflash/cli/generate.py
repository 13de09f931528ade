"""`treeflash generate`: one answer, streamed."""

import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import attrs
import click

from treeflash.cli.options import drawable, dtype_option, laid_over, overrides_option, recipe_argument
from treeflash.cli.waiting import waiting
from treeflash.errors import InputError
from treeflash.plugins import Registry
from treeflash.ranges import MAX_SEED
from treeflash.recipe import Recipe

if TYPE_CHECKING:
    from treeflash.engine import Decoder, Emission, Generation
    from treeflash.engine.audit import Audit
    from treeflash.target.text import TextCodec
    from treeflash.target_interface import Target


@click.command()
@recipe_argument
@click.argument("prompt", required=False)
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Where to stop."
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy."
)
@click.option("--seed", type=click.IntRange(min=0, max=MAX_SEED), default=0, show_default=True)
@dtype_option
@overrides_option
@click.option("--raw", is_flag=True, help="Take PROMPT as it is, not as a user's turn of a chat.")
@click.option("--show-tree", is_flag=True, help="Draw each step's tree, the accepted path starred.")
@click.option("--audit", is_flag=True, help="Decode plainly too, and compare.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; trees go to the error stream.")
def generate(
    recipe: str,
    prompt: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    dtype: str | None,
    overrides: tuple[str, ...],
    raw: bool,
    show_tree: bool,
    audit: bool,
    as_json: bool,
) -> None:
    """Answer PROMPT with RECIPE, the name of a recipe or the path of one.

    A PROMPT of - is read from standard input, and so is one that is left out where something is piped in; a
    line break at its end is dropped.

    The answer goes to standard output, figures to the error stream. With --audit, a difference from plain
    decoding that is no near-tie gives exit status 1.
    """
    prompt = _prompt(prompt)
    registry = Registry.load()
    if recipe not in registry.recipes and prompt in registry.recipes:
        raise InputError(f"expected the recipe first and the prompt behind it, found {prompt!r} for a prompt")
    laid = laid_over(overrides, dtype)
    Recipe.check_outline(recipe, registry, laid)
    with waiting("starting"):
        # What takes seconds to import comes after all that can be refused without it.
        from treeflash.engine.audit import MISMATCH, audited
        from treeflash.engine.stopping import STOP_TOKEN
        from treeflash.target.text import TextStream

        checked = Recipe.load(recipe, registry, laid)
    checked.locate_target(registry)  # shows its own progress
    with waiting("loading the model") as progress:
        target = checked.load_target(registry)
        codec = _codec(target)
        prompt_ids = codec.encode_raw(prompt) if raw else codec.encode_chat(prompt)
        decoder = checked.build(registry, target, progress=progress)
    stream = TextStream(codec)
    pieces: list[str] = []
    steps = itertools.count(1)

    def show(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            click.echo(piece, nl=False)

    def spell(token: int) -> str:
        return repr(codec.tokenizer.decode([token]))

    def receive(emission: "Emission") -> None:
        stopped = emission.stop_reason == STOP_TOKEN
        show(stream.push(emission.token_ids[:-1] if stopped else emission.token_ids))
        if show_tree and emission.tree is not None:
            emitted = emission.path[: len(emission.token_ids) + 1]
            picture = drawable(emission.tree.picture(spell, emitted), err=as_json)
            click.echo(f"\nstep {next(steps)}\n{picture}", err=as_json)

    settings: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "on_emission": receive,
    }
    found = None
    if audit:
        result, found = audited(decoder, prompt_ids, **settings)
    else:
        result = decoder.generate(prompt_ids, **settings)
    show(stream.close())
    if as_json:
        report = _report(result, "".join(pieces))
        click.echo(json.dumps(report if found is None else {**report, "audit": attrs.asdict(found)}))
    else:
        click.echo()
        click.echo(f"\n{_summary(result)}", err=True)
        advice = _advice(result, decoder)
        if advice:
            click.echo(advice, err=True)
        if found is not None:
            click.echo(f"[audit: {_verdict(found, decoder)}]", err=True)
    if found is not None and found.kind == MISMATCH:
        sys.exit(1)


def _prompt(given: str | None) -> str:
    """What is asked, from the command line or from standard input."""
    if given is None and (sys.stdin is None or sys.stdin.isatty()):
        raise click.MissingParameter(param_hint="'PROMPT'", param_type="argument")
    if given not in (None, "-"):
        if not given:
            raise InputError("the prompt is empty: expected at least one character")
        return given
    if sys.stdin is None:
        raise InputError("the prompt is to be read from standard input, which is closed")
    try:
        prompt = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: not UTF-8 ({error.reason})") from None
    prompt = prompt.removesuffix("\n").removesuffix("\r")
    if not prompt:
        raise InputError("the prompt is empty: expected at least one character, standard input had none")
    return prompt


def _verdict(found: "Audit", decoder: "Decoder") -> str:
    from treeflash.engine.audit import LOSSY

    if found.kind == LOSSY:
        return f"not compared: verifier {type(decoder.verifier).__name__} is lossy on purpose"
    if found.identical:
        return "identical to plain decoding"
    return f"{found.kind} at new token {found.first_difference}"


def _codec(target: "Target") -> "TextCodec":
    from treeflash.target import HuggingFaceTarget

    if not isinstance(target, HuggingFaceTarget):
        raise InputError(f"expected a Hugging Face model to read text with, found {type(target).__name__}")
    return target.require_text()


def _report(result: "Generation", text: str) -> dict[str, Any]:
    statistics = result.statistics
    return {
        "text": text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "steps": len(statistics.steps),
        "block_efficiency": statistics.block_efficiency,
        "tokens_per_second": result.tokens_per_second,
        "accepted_per_depth": statistics.accepted_per_depth,
        "stop_reason": result.stop_reason,
    }


def _advice(result: "Generation", decoder: "Decoder") -> str:
    """What to try where drafting made the answer slower than plain decoding would have been."""
    statistics, costs = result.statistics, getattr(decoder.selector, "costs", None)
    plain = statistics.plain_seconds
    if plain is None and costs is not None:
        (plain,) = costs.up_to(0, result.prompt_tokens + result.new_tokens)
    if plain is None or not statistics.share_drafted:
        return ""
    speedup = result.tokens_per_second * plain
    if speedup >= 1:
        return ""
    return (
        f"[drafts did not pay here: {statistics.share_drafted:.0%} of the steps drafted, and the answer came "
        f"at about {speedup:.2f} times the speed of plain decoding; try a smaller tree, another --dtype or "
        "another drafter]"
    )


def _summary(result: "Generation") -> str:
    statistics = result.statistics
    return (
        f"[{result.new_tokens} tokens in {len(statistics.steps)} steps, "
        f"block efficiency {statistics.block_efficiency:.2f}, "
        f"{result.tokens_per_second:.1f} tokens/s, ended by {result.stop_reason}]"
    )
