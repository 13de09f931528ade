"""Measuring from Python: what `treeflash bench` and `treeflash eval` do, with decoders as well as recipes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from treeflash.engine import Decoder
from treeflash.errors import InputError, first_line, nearest
from treeflash.evaluation.arms import PLAIN, Arm, ArmText, open_arms
from treeflash.evaluation.bench import MANIFEST, Bench, BenchSettings
from treeflash.evaluation.eval_report import write_page
from treeflash.evaluation.evaluate import EvalSettings, write_results
from treeflash.evaluation.evaluate import evaluate as measure
from treeflash.evaluation.prompt_sets import PromptSet, open_set, same_names
from treeflash.evaluation.report import Provenance, write_report
from treeflash.evaluation.summary import ArmSummary, summarise
from treeflash.evaluation.weights import network_digests, weights_of
from treeflash.extras import require_packages
from treeflash.plugins import Registry
from treeflash.prompts import Prompt
from treeflash.recipe import Recipe
from treeflash.returned import spell_value
from treeflash.target import HuggingFaceTarget
from treeflash.training.folders import read_manifest
from treeflash.training.locks import held

Arms = Mapping[str, str | Path | Decoder] | Sequence[str | Path] | str | Path
Prompts = Mapping[str, Sequence[str]] | Sequence[str | Path] | str | Path
T = TypeVar("T")


def bench(
    arms: Arms,
    prompts: Prompts,
    out: str | Path,
    *,
    limit: int | None = None,
    draw: int | None = None,
    on_answer: Callable[[int, int], None] = lambda done, total: None,
    **settings: Any,
) -> dict[str, list[ArmSummary]]:
    """Measures decoders and recipes against plain decoding of the same target, as `treeflash bench` does.

    A measurement that was stopped is resumed by the same call.

    Args:
        arms: By name, decoders and recipes; or recipes alone, each written as the command takes an arm.
            Decoders have to share one target object, and recipes beside them are built on it.
        prompts: By name, texts to answer; or prompt sets, each written as the command takes one.
        out: Folder for the figures and `report.html`.
        limit: Prompts of each set; all when not given.
        draw: Seed to draw them by; the first ones when not given.
        on_answer: Called with the number of answers done and of all.
        **settings: As in `treeflash.evaluation.bench.BenchSettings`: `max_new_tokens`, `temperature`, `seed`,
            `time_stages`.

    Returns:
        By prompt set, a summary of each arm, plain decoding first.

    Raises:
        TreeflashError: When an arm, a prompt set, a setting or the folder is at fault.
    """
    require_packages("a report", "matplotlib")
    made = _settings(BenchSettings, settings)
    sets = _prompt_sets(prompts, limit, draw)
    target, opened = _opened(arms)
    summaries = summarise(Bench(target, opened, sets, made, Path(out), on_answer).run())
    manifest = read_manifest(Path(out), MANIFEST, "a folder of treeflash bench")
    provenance = Provenance(_target_name(target, opened), {chosen.name: chosen.source for chosen in sets})
    write_report(Path(out), summaries, manifest, provenance)
    return summaries


def evaluate(
    arms: Arms,
    data: str | Path,
    out: str | Path | None = None,
    *,
    on_text: Callable[[int], None] = lambda done: None,
    **settings: Any,
) -> dict[str, Any]:
    """Measures decoders and recipes along texts that the target wrote, as `treeflash eval` does.

    Args:
        arms: As in `bench`.
        data: A data directory of the target's answers, as `treeflash regenerate` writes them.
        out: Folder for `eval.json` and `eval.html`; without one, nothing is written.
        on_text: Called with the number of texts done.
        **settings: `split`: "heldout", "train" or "all"; and `limit`, `anchors`, `paths`, `budgets`, `real`,
            `seed`, as in `treeflash.evaluation.evaluate.EvalSettings`.

    Returns:
        What `eval.json` holds.

    Raises:
        TreeflashError: When an arm, the data, a setting or the folder is at fault.
    """
    if out is not None:
        require_packages("a report", "matplotlib")
    parts = {"heldout": "heldout", "train": "train", "all": None}
    if settings.get("split", "heldout") not in parts:
        raise InputError(f"split: expected {', '.join(parts)}, found {settings['split']!r}")
    made = _settings(EvalSettings, {**settings, "split": parts[settings.get("split", "heldout")]})
    target, opened = _opened(arms)
    if out is None:
        return measure(target, opened, Path(data), made, on_text)
    with held(Path(out)):
        results = measure(target, opened, Path(data), made, on_text)
        write_results(Path(out), results)
        write_page(Path(out), results)
    return results


def _settings(kind: type[T], given: Mapping[str, Any]) -> T:
    known = [field.name for field in attrs.fields(kind)]  # type: ignore[arg-type]  # attrs classes both
    for key in given:
        if key not in known:
            raise InputError(f"no setting is called {key!r}{nearest(key, known)}")
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:  # of its validators
        raise InputError(f"settings: {first_line(error)}") from None


def _prompt_sets(prompts: Prompts, limit: int | None, draw: int | None) -> list[PromptSet]:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise InputError(f"limit: expected an integer of at least 1, found {limit!r}")
    if not prompts:
        raise InputError("prompts: expected at least one set, found none")
    if isinstance(prompts, Mapping):
        for name, texts in prompts.items():
            if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
                raise InputError(f"prompts {name}: expected a list of texts, found {spell_value(texts)}")
        sets = {name: [Prompt((text,)) for text in texts] for name, texts in prompts.items()}
        return [PromptSet.of(name, "Python", found, limit, draw) for name, found in sets.items()]
    places = [str(place) for place in ([prompts] if isinstance(prompts, str | Path) else prompts)]
    fault = same_names(places)
    if fault is not None:
        raise InputError(f"prompts: {fault}")
    return [open_set(place, limit=limit, draw=draw) for place in places]


def _opened(arms: Arms) -> tuple[HuggingFaceTarget, list[Arm]]:
    """The target, and the arms on it, plain decoding first."""
    registry, asked = Registry.load(), _named(arms)
    if not asked:
        raise InputError("arms: expected at least one recipe or decoder, found none")
    decoders = [arm for arm in asked.values() if isinstance(arm, Decoder)]
    texts = {name: arm for name, arm in asked.items() if isinstance(arm, ArmText)}
    if not decoders:
        return open_arms(list(texts.values()), registry, {})
    target = decoders[0].target
    if not isinstance(target, HuggingFaceTarget):
        raise InputError(f"expected a Hugging Face model to measure, found {type(target).__name__}")
    if PLAIN in asked:
        raise InputError(
            f"arm {PLAIN}: that name is plain decoding's, which is measured anyway; choose another"
        )
    opened = [Arm(PLAIN, None, Decoder(target))]
    for name, arm in asked.items():
        if isinstance(arm, Decoder):
            if arm.target is not target:
                raise InputError(
                    f"arm {name}: expected a decoder of the same target object as the others', found one of "
                    "another; treeflash.load(..., target=decoder.target) builds a recipe on a loaded target"
                )
            opened.append(Arm(name, None, arm, network_digests(arm)))
        else:
            recipe = Recipe.load(arm.recipe, registry, arm.overrides)
            opened.append(Arm(name, recipe, recipe.build(registry, target), weights_of(recipe, registry)))
    return target, opened


def _target_name(target: HuggingFaceTarget, arms: Sequence[Arm]) -> str:
    """What to call the target: as a recipe does, or as transformers does."""
    said = [arm.recipe.target.model for arm in arms if arm.recipe is not None]
    # Recipes beside decoders are built on their target, and may name another.
    by_recipe = said and all(arm.recipe is not None for arm in arms if arm.name != PLAIN)
    return said[0] if by_recipe else target.config.name_or_path or type(target.model).__name__


def _named(arms: Arms) -> dict[str, ArmText | Decoder]:
    if isinstance(arms, Mapping):
        return {
            name: arm if isinstance(arm, Decoder) else attrs.evolve(_text(arm), name=name)
            for name, arm in arms.items()
        }
    listed = [_text(arm) for arm in ([arms] if isinstance(arms, str | Path) else arms)]
    found = {arm.name: arm for arm in listed}
    if len(found) < len(listed):
        raise InputError("arms need names of their own: give them as a mapping from names")
    return dict(found)


def _text(arm: Any) -> ArmText:
    if isinstance(arm, Path):
        return ArmText(str(arm), str(arm), {})
    if isinstance(arm, str):
        return ArmText.parse(arm)
    raise InputError(
        f"expected the name or path of a recipe, or a decoder with a name like {{'mine': decoder}}, found "
        f"{spell_value(arm)}"
    )
