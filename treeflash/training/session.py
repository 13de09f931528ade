"""From a training recipe and data directories to a drafter."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import torch
from accelerate import Accelerator
from rich.filesize import decimal
from torch import Tensor

from treeflash.errors import CompositionError, InputError, blamed_on
from treeflash.extras import require_packages
from treeflash.places import locate
from treeflash.plugins import Registry
from treeflash.recipe import Recipe, open_target
from treeflash.target.own_logits import require_own_logits
from treeflash.trainable import Trainable, TrainContext, TrainingTarget
from treeflash.training.checkpointing import Snapshots
from treeflash.training.corpus import Corpus
from treeflash.training.decoding_check import TEXTS, check_decoding
from treeflash.training.distribution import by_the_first, start_process
from treeflash.training.draws import question_generator, weights_generator
from treeflash.training.folders import begin
from treeflash.training.locks import held, remove_leftovers
from treeflash.training.measuring import HeldOut
from treeflash.training.metrics import read_metrics
from treeflash.training.plots import draw
from treeflash.training.run_record import begin_run, digest, read_adjusted
from treeflash.training.settings import CACHE
from treeflash.training.shipping import RECIPE, ship
from treeflash.training.states import CachedStates, ComputedStates, States
from treeflash.training.texts import pack
from treeflash.training.trainer import Progress, Trainer
from treeflash.training.training_recipe import TrainingRecipe
from treeflash.version import __version__

STATES = "states.json"


@attrs.frozen
class Listener:
    """Who is told how a run goes.

    Attributes:
        say: Called with a sentence now and then.
        on_states: Called with tokens read and tokens there are, while states are cached.
        on_progress: Called after each step.
        on_measured: Called with the step and each measurement.
    """

    say: Callable[[str], None] = lambda sentence: None
    on_states: Callable[[int, int], None] = lambda done, total: None
    on_progress: Callable[[Progress], None] = lambda progress: None
    on_measured: Callable[[int, dict[str, Any]], None] = lambda step, measured: None


def train(
    recipe: TrainingRecipe,
    registry: Registry,
    folders: Sequence[Path],
    out: Path,
    listener: Listener | None = None,
) -> Path:
    """Trains a drafter, from where an earlier run stopped.

    Args:
        recipe: How.
        registry: What is installed.
        folders: Data directories, as `treeflash regenerate` writes them.
        out: Folder of the run.
        listener: Who is told how it goes.

    Returns:
        The recipe that decodes with the trained drafter, in `out / "drafter"`.

    Raises:
        TreeflashError: When recipe, data and target do not go together, the folder was begun with other
            settings or is in use by another process, the disk is full, or the run cannot go on.
    """
    require_packages("training", "matplotlib", *(["tensorboard"] if recipe.train.tensorboard else []))
    accelerator, place = start_process(recipe.target.device, shard=recipe.train.shard)
    listener = listener if accelerator.is_main_process and listener is not None else Listener()
    with ExitStack() as holding:
        by_the_first(accelerator, lambda: holding.enter_context(held(out)))
        return _train(recipe, registry, folders, out, listener, accelerator, place, holding)


def _train(
    recipe: TrainingRecipe,
    registry: Registry,
    folders: Sequence[Path],
    out: Path,
    listener: Listener,
    accelerator: Accelerator,
    place: str,
    opened: ExitStack,
) -> Path:
    """Trains, in a folder that is held; `opened` closes what is opened."""
    with blamed_on(recipe.name):
        # No pass of a training is one that is compiled.
        target = open_target(attrs.evolve(recipe.target, device=place, compile=False), registry)
    weights = target.digest()
    corpus = Corpus.read(folders, weights, recipe.data.length, recipe.data.heldout_texts)
    corpus.check_tokens(target.vocab_size)
    require_own_logits(target, pack([corpus.train[0]], target.device).token_ids)
    size = recipe.loss_settings.shortlist
    columns = corpus.shortlist(size, target.vocab_size) if 0 < size < target.vocab_size else None
    with blamed_on(recipe.name):
        trainable = _start(recipe, target, corpus, columns)
    _require_questions(trainable, corpus, folders)
    trained = sum(weight.numel() for weight in trainable.parameters() if weight.requires_grad)
    parameters = sum(weight.numel() for weight in trainable.parameters())
    snapshots = Snapshots.of_run(out)
    by_the_first(accelerator, lambda: remove_leftovers(snapshots.folder))
    by_the_first(accelerator, lambda: _refuse_fewer(out, snapshots.last_step(), recipe.train.steps))
    states = _states(recipe, trainable, corpus, out, accelerator, listener)
    if isinstance(states, CachedStates):
        opened.enter_context(closing(states))
    facts = {
        "answers": corpus.fingerprint,
        "target_weights": weights,
        "dtype": str(target.dtype).removeprefix("torch."),  # which "fastest" leaves to the machine
        "first_weights": digest(trainable),
        "processes": accelerator.num_processes,
    }
    by_the_first(accelerator, lambda: begin_run(out, recipe.tables, facts, snapshots.last_step()))
    listener.say(
        f"{len(corpus.train)} texts to train on, {len(corpus.heldout)} to measure on; "
        f"{trained / 1e6:.1f} of {parameters / 1e6:.1f} million weights are trained"
    )
    heldout = HeldOut(trainable, corpus, states, recipe.data.length)
    if columns is not None:
        mass = heldout.left_out(columns)
        listener.say(
            f"the shortlist of {len(columns)} tokens leaves out {mass:.2%} of the target's probability"
        )
    trainer = Trainer(
        trainable=trainable,
        corpus=corpus,
        states=states,
        heldout=heldout,
        folder=out,
        train=recipe.train,
        data=recipe.data,
        optimizer_settings=recipe.optimizer,
        accelerator=accelerator,
        on_progress=listener.on_progress,
        on_measured=listener.on_measured,
        say=listener.say,
    )
    result = trainer.run()
    # All processes take part in a simulation, where weights are spread over them.
    numbers, simulated = heldout.measure_first(TEXTS)
    record = {
        "recipe": recipe.tables,
        "target": weights,
        "dtype": str(target.dtype).removeprefix("torch."),
        "data": {
            "texts": len(corpus.train),
            "heldout_texts": len(corpus.heldout),
            "tokens": int(corpus.train.answer_lengths.sum()),
            "fingerprint": corpus.fingerprint,
        },
        "parameters": parameters,
        "trained_parameters": trained,
        "steps": recipe.train.steps,
        "settings_on_the_way": read_adjusted(out),
        **result,
        "versions": {"treeflash": __version__, "torch": torch.__version__},
    }
    if accelerator.is_main_process:
        # Before all else that may fail: it is what the run was for.
        shipped = ship(trainable, out / "drafter", recipe.decoding_tables(), record)
        decoder = Recipe.load(shipped, registry).build(registry, target)
        texts = [corpus.texts[number] for number in numbers]
        listener.say(check_decoding(decoder, target, texts, simulated).sentence())
        with blamed_on(f"the drafter is written to {shipped.parent}"):
            draw(out, read_metrics(out))
        return shipped
    # Weights may be spread over all processes: all take part, and one keeps what is written.
    with TemporaryDirectory() as elsewhere:
        ship(trainable, Path(elsewhere) / "drafter", recipe.decoding_tables(), record)
    return out / "drafter" / RECIPE


def _require_questions(trainable: Trainable, corpus: Corpus, folders: Sequence[Path]) -> None:
    """Refuses texts along which the drafter asks nothing: too short, most likely."""
    device = trainable.target.device
    asked = (trainable.ask(pack([text], device), [question_generator(0, 0, 0)]) for text in corpus.train)
    if not any(task.weight > 0 for task in asked):
        raise InputError(
            f"{', '.join(map(str, folders))}: nothing to learn from for {type(trainable).__name__}: none of "
            f"the {len(corpus.train)} texts to train on is long enough; regenerate with a greater "
            "--max-new-tokens"
        )


def _refuse_fewer(out: Path, done: int, wanted: int) -> None:
    """Makes sure that a run is not told to end before where it is."""
    if done > wanted:
        raise InputError(f"{out}: train.steps: expected at least {done}, which are done, found {wanted}")


def _start(
    recipe: TrainingRecipe, target: TrainingTarget, corpus: Corpus, columns: Tensor | None
) -> Trainable:
    """Makes what is trained, as it is before the first step."""
    context = TrainContext(
        target=target,
        locate=locate,
        loss=recipe.loss.from_options(recipe.loss_options, None),
        columns=columns,
        frequent=lambda size: corpus.shortlist(size, target.vocab_size),
        refiner=recipe.refiner,
        refiner_options=recipe.refiner_options,
        dtype=torch.bfloat16 if recipe.train.dtype == "bfloat16" else torch.float32,
        generator=weights_generator(recipe.train.seed),
    )
    trainable: Trainable = recipe.trainable.from_options(recipe.trainable_options, context)
    if not any(weight.requires_grad for weight in trainable.parameters()):
        raise CompositionError("nothing is left to train")
    return trainable


def _states(
    recipe: TrainingRecipe,
    trainable: Trainable,
    corpus: Corpus,
    out: Path,
    accelerator: Accelerator,
    listener: Listener,
) -> States:
    """Makes the target's states ready."""
    target: Any = trainable.target
    computed = ComputedStates(target, trainable.tap_layers)
    if recipe.data.states != CACHE:
        return computed
    folder = recipe.data.states_folder
    cached = CachedStates(computed, out / "states" if folder is None else Path(folder), corpus.texts)
    manifest: Mapping[str, Any] = {
        "target": target.digest(),
        "dtype": str(target.dtype),
        "data": corpus.fingerprint,
        "tap_layers": list(trainable.tap_layers),
    }

    def prepare() -> None:
        remove_leftovers(cached.folder)
        begin(cached.folder, STATES, manifest)
        cached.check_room()

    if cached.folder.resolve() == out.resolve():
        raise InputError(f"data.states_folder: expected a folder of its own, found the run's, {out}")
    with ExitStack() as holding:
        # Other runs may read them too; only one writes them.
        if cached.folder != out / "states":
            by_the_first(accelerator, lambda: holding.enter_context(held(cached.folder)))
        by_the_first(accelerator, prepare)
        if cached.missing():
            listener.say(f"the target's states take {decimal(cached.size())} in {cached.folder}")
            total, done = int(corpus.texts.lengths.sum()), 0
            for read in cached.fill(accelerator.process_index, accelerator.num_processes):
                done += read * accelerator.num_processes
                listener.on_states(done, total)
        accelerator.wait_for_everyone()
    return cached
