"""Refiners read from checkpoints: which fit which, and that the text stays the target's."""

from pathlib import Path

import pytest
import torch

from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.bilinear import Bilinear, BilinearOptions
from treeflash.components.refiners.linear import Linear
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.components.refiners.trained import RefinerOptions
from treeflash.components.refiners.two_token import TwoToken
from treeflash.components.selectors.chain import Chain
from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import CheckpointError
from treeflash.interfaces import BuildContext

REFINERS = {"swiglu": SwiGlu, "two-token": TwoToken, "linear": Linear, "bilinear": Bilinear}
PROMPT = "Ana has 7 apples. Ana"


@pytest.fixture
def written(checkpoint_files, random_refiner):
    """Writes the shipped backbone with random weights of a refiner."""
    return lambda layout, folder: checkpoint_files.with_refiner(layout, random_refiner(layout)).write(folder)


def generate(target, parts=None, **settings):
    prompt = target.text.encode_chat(PROMPT)
    return Decoder(target, **(parts or {})).generate(prompt, max_new_tokens=40, **settings)


@pytest.mark.parametrize("layout", REFINERS)
def test_each_layout_is_read_by_its_names(written, layout, tmp_path, tiny_target, random_refiner):
    refiner = REFINERS[layout].from_checkpoint(written(layout, tmp_path), tiny_target)
    state, expected = refiner.network.state_dict(), random_refiner(layout)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name].cpu(), tensor), name
        assert state[name].device == tiny_target.device


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("builder", [TopM(branching=6, children=4), Frontier(children=4)])
@pytest.mark.parametrize("layout", REFINERS)
def test_decodes_the_targets_own_text(written, layout, builder, temperature, tmp_path, tiny_target):
    folder = written(layout, tmp_path)
    parts = {
        "drafter": DFlash.from_checkpoint(folder, tiny_target),
        "builder": builder,
        "refiner": REFINERS[layout].from_checkpoint(folder, tiny_target),
        "selector": OptTree(budget=9),
    }
    found = generate(tiny_target, parts, temperature=temperature, seed=3)
    expected = generate(tiny_target, temperature=temperature, seed=3)
    assert found.token_ids == expected.token_ids
    assert found.stop_reason == expected.stop_reason


@pytest.mark.parametrize("layout", REFINERS)
def test_a_chain_of_each_layout_is_lossless(written, layout, tmp_path, tiny_target):
    folder = written(layout, tmp_path)
    parts = {
        "drafter": DFlash.from_checkpoint(folder, tiny_target),
        "builder": Frontier(children=1),
        "refiner": REFINERS[layout].from_checkpoint(folder, tiny_target),
        "selector": Chain(),
    }
    assert generate(tiny_target, parts).token_ids == generate(tiny_target).token_ids


@pytest.mark.parametrize("layout", REFINERS)
def test_a_refiner_of_zeros_drafts_as_the_backbone_does(
    layout, tmp_path, tiny_target, checkpoint_files, random_refiner
):
    weights = random_refiner(layout)
    last = {"linear": "linear.weight", "bilinear": "successor.weight"}.get(layout, "d.weight")
    weights[last].zero_()
    folder = checkpoint_files.with_refiner(layout, weights).write(tmp_path)
    drafter = DFlash.from_checkpoint(folder, tiny_target)
    refiner = REFINERS[layout].from_checkpoint(folder, tiny_target)
    tree = {"drafter": drafter, "builder": Frontier(children=8), "selector": OptTree(budget=12)}
    refined = generate(tiny_target, {**tree, "refiner": refiner})
    plain = generate(tiny_target, {**tree, "refiner": NoRefiner()})
    steps = [(step.num_drafted, step.num_accepted) for step in refined.statistics.steps]
    assert steps == [(step.num_drafted, step.num_accepted) for step in plain.statistics.steps]


def test_the_refiner_may_lie_in_a_folder_of_its_own(written, tmp_path, models, tiny_target):
    parts = {
        "drafter": DFlash.from_checkpoint(models / "tiny-dflash", tiny_target),
        "builder": TopM(branching=6, children=6),
        "refiner": Linear.from_checkpoint(written("linear", tmp_path), tiny_target),
        "selector": OptTree(budget=9),
    }
    assert generate(tiny_target, parts).token_ids == generate(tiny_target).token_ids


def test_a_chain_ignores_the_refiner_in_the_file(models, tiny_target):
    parts = {"builder": Marginal(), "refiner": NoRefiner(), "selector": Chain()}
    expected = generate(tiny_target)
    for name in ("tiny-dflash", "tiny-treeflash"):
        drafter = DFlash.from_checkpoint(models / name, tiny_target)
        found = generate(tiny_target, {"drafter": drafter, **parts})
        assert found.token_ids == expected.token_ids
        assert found.statistics.block_efficiency > 1.5


@pytest.mark.parametrize("asked", REFINERS)
def test_the_file_must_say_the_same_layout(written, asked, tmp_path, tiny_target):
    stored = "linear" if asked == "swiglu" else "swiglu"
    with pytest.raises(CheckpointError) as error:
        REFINERS[asked].from_checkpoint(written(stored, tmp_path), tiny_target)
    assert f"ar_approximation: expected '{asked}', found '{stored}'" in str(error.value)


def test_a_file_without_a_refiner_is_refused(models, tiny_target):
    with pytest.raises(CheckpointError, match="expected 'swiglu', found no refiner"):
        SwiGlu.from_checkpoint(models / "tiny-dflash", tiny_target)


def test_a_layout_named_but_not_stored_is_refused(tmp_path, tiny_target, checkpoint_files):
    folder = checkpoint_files.with_refiner("swiglu", {}).write(tmp_path)
    with pytest.raises(CheckpointError, match="4 faults"):
        SwiGlu.from_checkpoint(folder, tiny_target)


def test_the_older_config_names_the_layout_at_the_top(tmp_path, tiny_target, checkpoint_files):
    files = checkpoint_files.shipped()
    files.config |= files.config.pop("treeflash_config")
    SwiGlu.from_checkpoint(files.write(tmp_path), tiny_target)


def test_the_rank_is_that_of_the_stored_tables(tmp_path, tiny_target, checkpoint_files, random_refiner):
    files = checkpoint_files.with_refiner("bilinear", random_refiner("bilinear", rank=5))
    refiner = Bilinear.from_checkpoint(files.write(tmp_path), tiny_target)
    assert refiner.network.predecessor.weight.shape[1] == 5


def test_options_say_how_many_candidates(written, tmp_path, tiny_target):
    written("bilinear", tmp_path)
    context = BuildContext(tiny_target, lambda place: tmp_path / place, drafter_checkpoint=".")
    assert Bilinear.from_options(BilinearOptions(candidates=7), context).candidates == 7
    assert Bilinear.from_options(BilinearOptions(), context).candidates == 64


def test_a_refiner_without_any_checkpoint_is_refused(tiny_target):
    context = BuildContext(tiny_target, Path, drafter_checkpoint=None)
    with pytest.raises(CheckpointError, match=r"'swiglu' needs weights; expected a key checkpoint"):
        SwiGlu.from_options(RefinerOptions(), context)
