"""What is measured side by side: plain decoding, and recipes on the same target."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from treeflash.errors import InputError, RecipeError, blamed_on
from treeflash.json_files import parse_json
from treeflash.plugins import KINDS, Registry
from treeflash.recipe import Recipe
from treeflash.recipe_tables import merge, parse_overrides

if TYPE_CHECKING:
    from treeflash.engine import Decoder
    from treeflash.target import HuggingFaceTarget

PLAIN = "plain"
# A comma begins another override only where a key follows, so that lists may hold some.
_COMMA = re.compile(r",(?=\w+\.\w+=)")
# A recipe's name or path may hold commas and dots too, but hardly a table's name between them.
_VALUELESS = re.compile(rf",(?P<key>(?:{'|'.join(('target', *KINDS))})\.\w+)(?=,|$)")
_NAMED = re.compile(r"(?P<name>[^=,./\\]+)=(?P<rest>.+)")


@attrs.frozen(eq=False)
class Arm:
    """One way to decode.

    Attributes:
        name: What reports call it.
        recipe: Where it is from; None for plain decoding, and for a decoder that was made in Python.
        decoder: Its parts.
        weights: Digests of what its parts are read from, by kind and key.
    """

    name: str
    recipe: Recipe | None
    decoder: "Decoder"
    weights: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen
class ArmText:
    """An arm as it is asked for: `RECIPE`, or `NAME=RECIPE,table.key=value,...`.

    Attributes:
        name: What reports call it; the text itself when it has no name.
        recipe: Name or path of a recipe.
        overrides: What is laid over the recipe.
    """

    name: str
    recipe: str
    overrides: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "ArmText":
        """Reads an arm.

        Args:
            text: As above; overrides as `-o` takes them.

        Raises:
            RecipeError: For overrides that are none.
        """
        if valueless := _VALUELESS.search(text):
            key = valueless["key"]
            raise RecipeError(f"arm {text}: {key}: expected a value, found none: {key}=VALUE")
        recipe, *overrides = _COMMA.split(text)
        named = _NAMED.fullmatch(recipe)
        name, recipe = (named["name"], named["rest"]) if named else (text, recipe)
        try:
            return cls(name, recipe, parse_overrides(overrides))
        except RecipeError as error:
            raise RecipeError(f"arm {text}: {error}") from None


def check_arms(asked: Sequence[ArmText], registry: Registry, overrides: Mapping[str, Any]) -> None:
    """Checks as much of arms as needs no component, which takes seconds to import.

    Args:
        asked: The arms.
        registry: What is installed.
        overrides: What is laid over all recipes.

    Raises:
        TreeflashError: When a recipe's outline is at fault, or two arms have one name.
    """
    names = [arm.name for arm in asked]
    if PLAIN in names:
        raise InputError(
            f"arm {PLAIN}: the name is that of plain decoding, which is measured in any case; "
            "expected another: NAME=RECIPE,..."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"arms need names of their own, found {', '.join(twice)} twice: NAME=RECIPE,...")
    for arm in asked:
        Recipe.check_outline(arm.recipe, registry, merge(overrides, arm.overrides))


def open_arms(
    asked: Sequence[ArmText],
    registry: Registry,
    overrides: Mapping[str, Any],
    *,
    progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    by_clock: bool = True,
) -> "tuple[HuggingFaceTarget, list[Arm]]":
    """Loads one target and builds all arms on it, plain decoding first.

    Args:
        asked: The arms.
        registry: What is installed.
        overrides: What is laid over all recipes; an arm's own go before it.
        progress: As in `Recipe.build`.
        by_clock: As in `Recipe.build`.

    Returns:
        The target, and the arms.

    Raises:
        TreeflashError: When a recipe is at fault, two arms have one name, or their targets differ.
    """
    check_arms(asked, registry, overrides)
    from treeflash.engine import Decoder
    from treeflash.evaluation.weights import weights_of
    from treeflash.target import HuggingFaceTarget

    recipes = [Recipe.load(arm.recipe, registry, merge(overrides, arm.overrides)) for arm in asked]
    first = recipes[0]
    for recipe, arm in zip(recipes, asked, strict=True):
        if recipe.target != first.target:
            raise InputError(
                f"arm {arm.name}: expected the target of {asked[0].name}, {_spelled(first)}, found "
                f"{_spelled(recipe)}; -o target.model=... gives all the same"
            )
    with blamed_on(first.name):
        target = first.load_target(registry)
    if not isinstance(target, HuggingFaceTarget):
        raise InputError(f"expected a Hugging Face model to measure, found {type(target).__name__}")
    arms = [Arm(PLAIN, None, Decoder(target))]
    for arm, recipe in zip(asked, recipes, strict=True):
        decoder = recipe.build(registry, target, progress=progress, by_clock=by_clock)
        arms.append(Arm(arm.name, recipe, decoder, weights_of(recipe, registry)))
    return target, arms


def measured(target: "HuggingFaceTarget", arms: Sequence[Arm]) -> dict[str, Any]:
    """What is measured, as JSON has it: with anything else in its place, figures would be others.

    Args:
        target: The target of all arms.
        arms: The arms.

    Returns:
        `target`: its weights, dtype and device, and how it is read. `arms`: the components and options by arm
        and kind. `weights`: digests of what those are read from, by arm, kind and key.
    """
    return {
        "target": {
            "weights": target.digest(),
            "dtype": str(target.dtype).removeprefix("torch."),
            "device": str(target.device),
            "lean": target.lean is not None,
            "compiled": target.compiled is not None,
        },
        "arms": {arm.name: _parts(arm) for arm in arms},
        "weights": {arm.name: dict(arm.weights) for arm in arms},
    }


def _parts(arm: Arm) -> dict[str, Any]:
    """The components of an arm and what they are set to, by kind."""
    if arm.name == PLAIN:
        return {}
    if arm.recipe is None:
        made = {kind: getattr(arm.decoder, kind) for kind in KINDS}
        return {kind: _described(part) for kind, part in made.items() if part is not None}
    return {kind: {"use": part.use, **attrs.asdict(part.options)} for kind, part in arm.recipe.parts.items()}


def _described(part: Any) -> dict[str, Any]:
    """A component made in Python: its class, and those of its fields that JSON can hold."""
    fields = attrs.fields(type(part)) if attrs.has(type(part)) else ()
    values: dict[str, Any] = {"use": f"{type(part).__module__}:{type(part).__qualname__}"}
    for field in fields:
        # Weights and the like are compared by their digests.
        with suppress(TypeError, ValueError):
            if field.init:
                values[field.name] = parse_json(json.dumps(getattr(part, field.name)))
    return values


def weight_places(arms: Sequence[Arm]) -> set[str]:
    """Names what two measurements may differ in: where weights lie, which are compared themselves.

    Args:
        arms: The arms.

    Returns:
        Dotted keys of `measured`.
    """
    return {f"arms.{arm.name}.{key}" for arm in arms for key in arm.weights}


def refuse_lossy(arms: Sequence[Arm]) -> None:
    """Makes sure that arms write the target's own text, as measuring along such a text assumes.

    Args:
        arms: The arms.

    Raises:
        InputError: Naming those that do not.
    """
    for arm in arms:
        if not arm.decoder.lossless:
            raise InputError(
                f"arm {arm.name}: verifier {type(arm.decoder.verifier).__name__} is lossy on purpose, "
                "and this measures along the target's own texts, which it would not write; leave the arm out "
                'or give it an exact verifier (verifier.use="sdpa-tree")'
            )


def _spelled(recipe: Recipe) -> str:
    return ", ".join(f"{key} {value}" for key, value in attrs.asdict(recipe.target).items())
