"""The training loop: passes, a step, a measurement, a snapshot."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from treeflash.checkpoints.writing import gathered
from treeflash.errors import CheckpointError, TrainingError, first_line
from treeflash.packed_text import PackedText
from treeflash.trainable import Task, Trainable
from treeflash.training.averaging import WeightAverage
from treeflash.training.checkpointing import Snapshot, Snapshots
from treeflash.training.corpus import Corpus
from treeflash.training.distribution import (
    by_the_first,
    distribute,
    exchanging,
    passes_of_all,
    settle,
    summed,
)
from treeflash.training.draws import batch_of, question_generator
from treeflash.training.measuring import HeldOut, headline
from treeflash.training.metrics import Mark, Metrics
from treeflash.training.schedule import Watch, learning_rate
from treeflash.training.settings import BFLOAT16, DataSettings, OptimizerSettings, TrainSettings
from treeflash.training.states import States
from treeflash.training.texts import pack, passes

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@attrs.frozen
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done.
        steps: In all.
        loss: Of the last step, nats.
        block_efficiency: Measured last, of the distribution that decodes.
        positions_per_second: Drafted positions learned from in a second, by all processes.
    """

    step: int
    steps: int
    loss: float
    block_efficiency: float
    positions_per_second: float


@attrs.frozen(eq=False)
class Pass:
    """A row of a step.

    Attributes:
        numbers: The texts in it.
        row: Packed.
        task: What is asked along it.
    """

    numbers: list[int]
    row: PackedText
    task: Task


@attrs.define
class Run:
    """Where a run stands between two steps.

    Attributes:
        step: Steps done.
        positions: Drafted positions learned from.
        seconds: Spent on steps.
        measured: The last measurement.
        measured_at: The step it was made after; None where that was not written down.
        watch: What was seen of the loss.
        recorded: What was written down of it.
    """

    step: int = 0
    positions: int = 0
    seconds: float = 0.0
    measured: dict[str, Any] = attrs.field(factory=dict)
    measured_at: int | None = None
    watch: Watch = attrs.field(factory=Watch)
    recorded: Mark = attrs.field(factory=Mark)


@attrs.define(eq=False)
class Trainer:
    """Trains whatever is trainable.

    Attributes:
        trainable: What to train.
        corpus: On what.
        states: What the target makes of it.
        heldout: What it is measured on.
        folder: Of the run.
        train: How long.
        data: How texts are read.
        optimizer_settings: How fast.
        accelerator: Of this process.
        on_progress: Called after each step, on the main process.
        on_measured: Called with the step and each measurement, on the main process.
        say: Called with a sentence now and then, on the main process.
    """

    trainable: Trainable
    corpus: Corpus
    states: States
    heldout: HeldOut
    folder: Path
    train: TrainSettings
    data: DataSettings
    optimizer_settings: OptimizerSettings
    accelerator: Accelerator
    on_progress: Callable[[Progress], None] = lambda progress: None
    on_measured: Callable[[int, dict[str, Any]], None] = lambda step, measured: None
    say: Callable[[str], None] = lambda sentence: None

    def run(self) -> dict[str, Any]:
        """Trains to the end, from the last snapshot if there is one.

        Returns:
            The last measurement, as `HeldOut.measure` gives it, and the run's `positions` and `seconds`.

        Raises:
            TrainingError: When the loss is no number or diverges.
        """
        model = distribute(self.trainable, self.accelerator, shard=self.train.shard)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = self._optimizer(weights)
        average = WeightAverage(weights, self.train.average)
        snapshots = Snapshots.of_run(self.folder, self.train.keep)
        last = snapshots.last()
        run = Run() if last is None else self._restore(last, snapshots.read(last), model, optimizer, average)
        with ExitStack() as opened:
            records: list[Metrics] = []

            def open_record() -> None:
                told = self.train.tensorboard
                metrics = Metrics(self.folder, run.step, run.recorded, tensorboard=told, say=self.say)
                records.append(opened.enter_context(metrics))
                # Only now: one that is broken may be deleted to resume from the one before.
                snapshots.prune()

            by_the_first(self.accelerator, open_record)
            self._continue(run, model, optimizer, average, snapshots, records)
        for weight, value in zip(weights, average.values, strict=False):
            weight.data.copy_(value)
        return {"heldout": run.measured, "positions": run.positions, "seconds": round(run.seconds, 1)}

    def _continue(
        self,
        run: Run,
        model: Any,
        optimizer: Any,
        average: WeightAverage,
        snapshots: Snapshots,
        records: Sequence[Metrics],
    ) -> None:
        """Takes the steps that are left."""
        main = self.accelerator.is_main_process

        def record(line: dict[str, Any]) -> None:
            for metrics in records:  # none but on the main process
                metrics.add({"step": run.step, **line})

        def measure() -> None:
            with average.in_place():
                run.measured, run.measured_at = self.heldout.measure(), run.step
                settle(model)
            record({"heldout": run.measured})
            if main:
                self.on_measured(run.step, run.measured)

        def save() -> None:
            for metrics in records:
                run.recorded = metrics.mark()
            self._save(snapshots, run, model, optimizer, average)

        if run.step == 0:
            measure()
        while run.step < self.train.steps:
            begin = time.perf_counter()
            loss, norm, asked = self._step(model, optimizer, self._passes(run.step), run.step)
            # Texts without a question, single tokens for instance, leave a step nothing to see.
            wrong = run.watch.see(loss) if asked else None
            if wrong is None and not math.isfinite(norm):
                wrong = f"the norm of the gradient is {norm}"
            if wrong is not None:
                kept = snapshots.last()
                good = "none was written yet" if kept is None else f"the last good checkpoint is {kept}"
                raise TrainingError(f"step {run.step + 1}: {wrong}; {good}")
            average.update(run.step)
            spent = time.perf_counter() - begin
            rate = self._rate(run.step)
            run.step, run.positions, run.seconds = run.step + 1, run.positions + asked, run.seconds + spent
            record({"loss": loss, "lr": rate, "grad_norm": norm, "positions": asked, "seconds": spent})
            at_end = run.step == self.train.steps
            if at_end or run.step % self.train.evaluate_every == 0:
                measure()
            if at_end or run.step % self.train.save_every == 0:
                save()
            if main:
                efficiency = headline(run.measured)
                self.on_progress(Progress(run.step, self.train.steps, loss, efficiency, asked / spent))
        if run.measured_at not in (run.step, None):
            # Told to end where it had been stopped.
            measure()
            save()

    def _optimizer(self, weights: Sequence[Tensor]) -> torch.optim.Optimizer:
        settings = self.optimizer_settings
        groups = [
            {
                "params": [weight for weight in weights if weight.ndim > 1],
                "weight_decay": settings.weight_decay,
            },
            {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), fused=True)

    def _rate(self, step: int) -> float:
        settings = self.optimizer_settings
        return learning_rate(step, self.train.steps, settings.lr, settings.warmup)

    def _passes(self, step: int) -> list[Pass]:
        """This process's rows of a step, and what is asked along them."""
        size, rank = self.data.batch_size, self.accelerator.process_index
        world = self.accelerator.num_processes
        texts = self.corpus.train
        batch = batch_of(step, size * world, len(texts), self.train.seed)[rank * size : (rank + 1) * size]
        lengths = [texts[number].length for _, number in batch]
        made = []
        for group in passes(lengths, self.data.length):
            members = [batch[index] for index in group]
            row = pack([texts[number] for _, number in members], self.trainable.target.device)
            generators = [question_generator(self.train.seed, epoch, number) for epoch, number in members]
            made.append(Pass([number for _, number in members], row, self.trainable.ask(row, generators)))
        return made

    def _step(self, model: Any, optimizer: Any, work: Sequence[Pass], step: int) -> tuple[float, float, int]:
        """One step of the optimizer over all passes of all processes.

        Returns:
            The loss by weight, the gradient's norm and the positions asked for; all 0 where nothing is
            asked, and nothing is changed.
        """
        accelerator, device = self.accelerator, self.trainable.target.device
        sums = torch.tensor(
            [sum(part.task.weight for part in work), sum(part.task.positions for part in work)],
            dtype=torch.float64,
            device=device,
        )
        weight, asked = summed(sums, accelerator).tolist()
        if weight == 0:
            return 0.0, 0.0, 0
        for group in optimizer.param_groups:
            group["lr"] = self._rate(step)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=device)
        count = passes_of_all(model, len(work), accelerator)
        for index in range(count):
            # One that runs out of rows takes part with its last, which then counts for nothing.
            part, counts = work[min(index, len(work) - 1)], float(index < len(work))
            read = self.states.read(part.numbers, part.row)
            with exchanging(model, now=index + 1 == count):
                with torch.autocast(device.type, torch.bfloat16, enabled=self.train.dtype == BFLOAT16):
                    loss = model(part.task, read) * counts
                # Processes' gradients are averaged where they should be summed.
                (loss * (accelerator.num_processes / weight)).backward()
            total += loss.detach().double()
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        norm = torch.nn.utils.clip_grad_norm_(weights, self.optimizer_settings.clip)
        value, size = float(summed(total, accelerator)) / weight, float(gathered(norm))
        if math.isfinite(size) and math.isfinite(value):
            optimizer.step()
        return value, size, int(asked)

    def _save(
        self, snapshots: Snapshots, run: Run, model: Any, optimizer: Any, average: WeightAverage
    ) -> None:
        """Writes everything that the next step depends on."""
        weights = _weights(model)
        kept: Any = get_optimizer_state_dict(model, optimizer, options=_WHOLE)
        averaged = {}
        if average.values:
            with average.in_place():
                averaged = {name: tensor.clone() for name, tensor in _weights(model).items()}
        if self.accelerator.is_main_process:
            tensors = {
                f"{weight}/{name}": value
                for weight, values in kept["state"].items()
                for name, value in values.items()
            }
            snapshots.write(Snapshot(run.step, weights, averaged, tensors, attrs.asdict(run)))
        self.accelerator.wait_for_everyone()

    def _restore(
        self, path: Path, snapshot: Snapshot, model: Any, optimizer: Any, average: WeightAverage
    ) -> Run:
        """Goes back to where a snapshot was taken."""
        try:
            run = _run_of(snapshot.numbers)
            self._restore_tensors(snapshot, model, optimizer, average)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: is not of this run ({first_line(error)}); delete it to resume from the checkpoint "
                "before"
            ) from error
        return run

    def _restore_tensors(
        self, snapshot: Snapshot, model: Any, optimizer: Any, average: WeightAverage
    ) -> None:
        # Every process has read the whole of it, and takes its part.
        full = StateDictOptions(full_state_dict=True)
        if average.values:
            set_model_state_dict(model, dict(snapshot.average), options=full)
            with torch.no_grad():
                for value, weight in zip(average.values, average.weights, strict=True):
                    value.copy_(weight)
        set_model_state_dict(model, dict(snapshot.weights), options=full)
        # What is no tensor is set anew each step, or by the recipe.
        kept: Any = get_optimizer_state_dict(model, optimizer, options=full)
        kept["state"] = {}
        for key, tensor in snapshot.optimizer.items():
            place, _, name = key.rpartition("/")
            kept["state"].setdefault(place, {})[name] = tensor
        set_optimizer_state_dict(model, optimizer, kept, options=full)


def _run_of(numbers: Mapping[str, Any]) -> Run:
    told = dict(numbers)
    return Run(watch=Watch(**told.pop("watch")), recorded=Mark(**told.pop("recorded")), **told)


def _weights(model: Any) -> dict[str, Tensor]:
    """All weights, gathered from wherever they are."""
    found: Any = get_model_state_dict(model, options=_WHOLE)
    return dict(found)
