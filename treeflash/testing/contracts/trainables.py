"""What training expects of a trainable."""

import tempfile
from pathlib import Path

import tomli_w
import torch

from treeflash.components.losses.forward_kl import ForwardKl
from treeflash.packed_text import PackedText, ReadText
from treeflash.places import locate
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.target import HuggingFaceTarget
from treeflash.testing.contracts.contract import MODELS, PROMPTS, Contract, check_lossless
from treeflash.testing.reference import reference_text
from treeflash.trainable import Trainable, TrainContext


class TrainableContract(Contract):
    """Subclass it and say how the trainable is made. Its plugin must be installed, to decode with it."""

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
        trainable = self._made()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tables = trainable.write(folder)
            target = {"model": f"{MODELS}/tiny-target", "dtype": self.dtype, "device": self.device}
            recipe = {"target": target, **tables}
            (folder / "recipe.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
            registry = Registry.load()
            check_lossless(Recipe.load(folder / "recipe.toml", registry).build(registry))

    def _made(self) -> Trainable:
        target = self.target()
        return self.make(
            TrainContext(
                target=target,
                locate=locate,
                loss=ForwardKl(),
                columns=None,
                frequent=torch.arange,
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
