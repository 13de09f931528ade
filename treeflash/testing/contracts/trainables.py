"""What training expects of a trainable."""

import tempfile
from itertools import pairwise
from pathlib import Path

import tomli_w
import torch

from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.engine import Decoder
from treeflash.engine.chains import chain_steps, spread_anchors
from treeflash.packed_text import PackedText, ReadText
from treeflash.places import locate
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.target import HuggingFaceTarget
from treeflash.testing.contracts.contract import MODELS, PROMPTS, Contract, check_lossless
from treeflash.testing.reference import reference_text
from treeflash.trainable import Simulation, Trainable, TrainContext

# Of what a step emits: simulations look at places drawn, decoding at all.
_AGREEMENT = 0.1
# Tokens of the tiny target: ASCII.
_VOCABULARY = 128
# Draws of places to simulate from, so that their mean says something of all places.
_DRAWS = 8


class TrainableContract(Contract):
    """Subclass it and say how the trainable is made. Its plugin must be installed, to decode with it.

    Attributes:
        overfit_steps: Optimizer steps in which it learns two short texts by heart.
        overfit_rate: Learning rate of these steps.
        learned: Share of the tokens a perfect drafter would emit that it must reach on those texts.
    """

    overfit_steps = 80
    overfit_rate = 3e-3
    learned = 0.75

    def make(self, context: TrainContext) -> Trainable:
        """Makes the trainable.

        Args:
            context: With the tiny target, forward KL over all tokens and no refiner.
        """
        raise NotImplementedError

    def test_questions_do_not_depend_on_packing(self) -> None:
        """A text is asked the same alone and beside another."""
        trainable = self._made()
        texts = self._texts(trainable)
        alone = [
            trainable.ask(PackedText.pack([text], self.device), [torch.Generator().manual_seed(number)])
            for number, text in enumerate(texts)
        ]
        generators = [torch.Generator().manual_seed(number) for number in range(len(texts))]
        together = trainable.ask(PackedText.pack(texts, self.device), generators)
        assert together.positions == sum(task.positions for task in alone)
        assert abs(together.weight - sum(task.weight for task in alone)) < 1e-3 * max(1.0, together.weight)
        assert together.weight > 0

    def test_it_can_be_learned_from(self) -> None:
        """The loss is a number, every weight that is trained gets a gradient, and a step makes it less."""
        trainable = self._made()
        row = self._read(trainable, self._texts(trainable))
        generators = [torch.Generator().manual_seed(number) for number in range(2)]
        task = trainable.ask(row.text, generators)
        weights = [weight for weight in trainable.parameters() if weight.requires_grad]
        assert weights, "nothing to train"
        optimizer = torch.optim.AdamW(weights, lr=1e-3)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = trainable(task, row)
            assert loss.shape == ()
            assert loss.dtype == torch.float32
            loss.backward()
            assert all(weight.grad is not None for weight in weights)
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0], f"the loss rose: {losses}"

    def test_simulation_is_in_range(self) -> None:
        """Counts are counts."""
        trainable = self._made()
        row = self._read(trainable, self._texts(trainable))
        task = trainable.ask(row.text, [torch.Generator().manual_seed(number) for number in range(2)])
        with torch.no_grad():
            measured = trainable.simulate(task, row)
        assert measured
        for simulation in measured.values():
            assert bool((simulation.hits <= simulation.rows).all())
            assert bool((simulation.divergence <= simulation.rows + 1e-3).all())
            assert simulation.blocks <= simulation.emitted

    def test_what_is_written_decodes(self) -> None:
        """A recipe with the tables it gives loads and writes the target's own text."""
        check_lossless(self._written(self._made()))

    def test_what_it_learns_it_drafts(self) -> None:
        """Overfitted, written and read again, it drafts two texts as far as its simulation says.

        Training and decoding each compute the draft. If they differ (states read one position late, positions
        counted from elsewhere, a weight that is not written), the loss still falls, the simulation looks good
        and the text is still the target's own: only the acceptance length of real steps shows it.
        """
        trainable = self._made()
        texts = self._texts(trainable)
        row = self._read(trainable, texts)
        weights = [weight for weight in trainable.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=self.overfit_rate)
        for step in range(self.overfit_steps):
            task = trainable.ask(row.text, self._generators(step))
            optimizer.zero_grad()
            (trainable(task, row) / task.weight).backward()
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        simulation = self._simulated(trainable, row)
        decoder = self._written(trainable)
        decoded, perfect = self._decoded(decoder, row.text, decoder.drafter.max_depth)
        simulated = simulation.emitted / simulation.blocks
        assert simulated >= self.learned * perfect, (
            f"after {self.overfit_steps} steps on two texts its simulation emits {simulated:.2f} tokens a "
            f"step, expected {self.learned} of the {perfect:.2f} that a perfect drafter would"
        )
        assert abs(decoded - simulated) <= _AGREEMENT * simulated, (
            f"its simulation emits {simulated:.2f} tokens a step along these texts, and the drafter it wrote "
            f"{decoded:.2f}: training and decoding do not compute the same"
        )

    def _written(self, trainable: Trainable) -> Decoder:
        """Writes the drafter and reads it again, as a recipe does."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tables = trainable.write(folder)
            target = {"model": f"{MODELS}/tiny-target", "dtype": self.dtype, "device": self.device}
            recipe = {"target": target, **tables}
            (folder / "recipe.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
            registry = Registry.load()
            return Recipe.load(folder / "recipe.toml", registry).build(registry)

    def _decoded(self, decoder: Decoder, text: PackedText, depth: int) -> tuple[float, float]:
        """Tokens a step that a decoder emits along texts, and that a perfect drafter would."""
        emitted, most = list[int](), list[int]()
        for (begin, end), answer in zip(pairwise(text.bounds), text.answers, strict=True):
            ids = text.token_ids[begin:end]
            anchors = spread_anchors(answer - begin, len(ids), len(ids))
            target: HuggingFaceTarget = decoder.target  # type: ignore[assignment]  # a recipe's
            emitted += chain_steps(decoder, target, ids, anchors)
            most += [min(1 + depth, len(ids) - 1 - anchor) for anchor in anchors]
        return sum(emitted) / len(emitted), sum(most) / len(most)

    def _simulated(self, trainable: Trainable, row: ReadText) -> Simulation:
        """What it says of itself, of the distribution that it decodes with."""
        total: Simulation | None = None
        with torch.no_grad():
            for draw in range(_DRAWS):
                task = trainable.ask(row.text, self._generators(draw))
                *_, found = trainable.simulate(task, row).values()
                total = found if total is None else total + found
        assert total is not None, "simulate gave nothing"
        return total

    def _generators(self, step: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(1000 * step + number) for number in range(2)]

    def _made(self) -> Trainable:
        target = self.target()
        return self.make(
            TrainContext(
                target=target,
                locate=locate,
                loss=ForwardKl(),
                columns=None,
                frequent=_frequent,
                refiner=None,
                refiner_options=None,
                dtype=torch.float32,
                generator=torch.Generator().manual_seed(0),
            )
        )

    def _texts(self, trainable: Trainable) -> list[tuple[list[int], list[int]]]:
        target: HuggingFaceTarget = trainable.target  # type: ignore[assignment]  # the one it was made with
        return [(list(prompt), reference_text(target.model, prompt, 30)) for prompt in PROMPTS[:2]]

    def _read(self, trainable: Trainable, texts: list[tuple[list[int], list[int]]]) -> ReadText:
        target, row = trainable.target, PackedText.pack(texts, self.device)
        layers = (*trainable.tap_layers, target.num_layers - 1)
        states = target.read(row.token_ids, row.positions, row.causal_visibility(), layers)
        return ReadText(row, states[:, : -target.hidden_size], states[:, -target.hidden_size :])


def _frequent(size: int) -> torch.Tensor:
    """The contract's texts as a corpus: their characters first, then the other tokens."""
    written = set(bytes(range(97, 123)) + b"".join(bytes(prompt) for prompt in PROMPTS))
    ordered = sorted(range(_VOCABULARY), key=lambda token: (token not in written, token))
    return torch.tensor(sorted(ordered[:size]))
