"""`treeflash check`: whether a recipe would decode here, and what it would take."""

from typing import TYPE_CHECKING, Any

import click

from treeflash.cli.options import dtype_option, laid_over, overrides_option, recipe_argument
from treeflash.cli.waiting import waiting
from treeflash.plugins import Registry
from treeflash.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn

    from treeflash.engine import Decoder
    from treeflash.target import HuggingFaceTarget

_TOKENS = 1024


@click.command()
@recipe_argument
@dtype_option
@overrides_option
def check(recipe: str, dtype: str | None, overrides: tuple[str, ...]) -> None:
    """Load RECIPE's target and drafter, and see that they fit, without generating.

    The target is probed with a tiny tree; checkpoints are read; memory is estimated. For trees whose size
    goes by what passes cost these are timed, once.
    """
    registry = Registry.load()
    laid = laid_over(overrides, dtype)
    Recipe.check_outline(recipe, registry, laid)
    checked = Recipe.load(recipe, registry, laid)
    checked.locate_target(registry)  # shows its own progress
    with waiting("loading the target") as progress:
        decoder = checked.build(registry, progress=progress)
    click.echo(f"{checked.path}: fits")
    for line in (*_target(decoder), *_parts(decoder, checked), *_costs(decoder)):
        click.echo(f"  {line}")


def _target(decoder: "Decoder") -> list[str]:
    from treeflash.target import HuggingFaceTarget

    target = decoder.target
    facts = target.fingerprint()
    lines = [
        f"target: {facts.num_layers} layers, hidden size {facts.hidden_size}, {facts.vocab_size} tokens, "
        f"{target.max_positions or 'any number of'} positions, {_dtype(target.dtype)} on {target.device}"
    ]
    if isinstance(target, HuggingFaceTarget):
        weights, copies = _bytes(target.model), _copies(target)
        more = f" and {copies / 1e6:.0f} MB of them in other layouts" if copies else ""
        config = target.config
        heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or facts.hidden_size // config.num_attention_heads
        cache = 2 * facts.num_layers * heads * width * target.dtype.itemsize * _TOKENS
        lines += [
            f"  verified in trees with {target.attention} attention",
            f"  memory: {weights / 1e6:.0f} MB of weights{more}, {cache / 1e6:.1f} MB of cache for {_TOKENS} "
            "tokens",
        ]
    return lines


def _copies(target: "HuggingFaceTarget") -> int:
    """Bytes of the weights that passes of our own lay out once more, each compiled graph again."""
    from torch import nn

    from treeflash.layouts import is_laid_out
    from treeflash.target.compiled import GRAPHS

    maps = [part.weight for part in target.model.modules() if isinstance(part, nn.Linear)]
    layouts = int(target.lean is not None and is_laid_out(maps[0]))
    layouts += GRAPHS * (target.compiled is not None and target.device.type == "cpu")
    return layouts * sum(weight.nbytes for weight in maps)


def _parts(decoder: "Decoder", recipe: Recipe) -> list[str]:
    from torch import nn

    lines = []
    for kind, part in recipe.parts.items():
        built: Any = getattr(decoder, kind)
        network = getattr(built, "network", None)
        memory = f", {_bytes(network) / 1e6:.1f} MB of weights" if isinstance(network, nn.Module) else ""
        if kind == "drafter":
            taps = ", ".join(map(str, decoder.drafter.tap_layers)) or "none"
            memory += f", {decoder.drafter.max_depth} levels, target layers read: {taps}"
        if kind == "verifier" and not decoder.lossless:
            memory += ", lossy on purpose: the text may differ from the target's own"
        lines.append(f"{kind}: {part.use}{memory}")
    return lines


def _costs(decoder: "Decoder") -> list[str]:
    """What passes were timed at, for selectors that go by it."""
    costs = getattr(decoder.selector, "costs", None)
    if costs is None:
        return []
    lines = ["milliseconds of a pass of the target, by its rows (the root and the nodes of its tree):"]
    for length, seconds in zip(costs.lengths, costs.seconds, strict=True):
        taken = ", ".join(
            f"{1000 * value:.1f} of {rows}" for rows, value in zip(costs.sizes, seconds, strict=True)
        )
        lines.append(f"  after {length} tokens: {taken}")
    return lines


def _bytes(module: "nn.Module") -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
