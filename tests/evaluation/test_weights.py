"""Digests of what arms are read from: they change with the contents, and with nothing else."""

import os
import shutil

import pytest

from treeflash.evaluation import weights
from treeflash.evaluation.weights import folder_digest, weights_of
from treeflash.plugins import Registry
from treeflash.recipe import Recipe


@pytest.fixture
def checkpoint(models, tmp_path):
    return shutil.copytree(models / "tiny-treeflash", tmp_path / "drafter")


def flip(path, place):
    """Changes a byte, and leaves size and time as they were."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_every_byte_counts(checkpoint, models):
    digests = [folder_digest(checkpoint)]
    assert digests == [folder_digest(models / "tiny-treeflash")]
    size = (checkpoint / "model.safetensors").stat().st_size
    for place in (20, size // 2, size - 1):
        flip(checkpoint / "model.safetensors", place)
        digests.append(folder_digest(checkpoint))
    flip(checkpoint / "config.json", 5)
    digests.append(folder_digest(checkpoint))
    assert len(set(digests)) == 5


def test_how_it_was_made_does_not(checkpoint):
    before = folder_digest(checkpoint)
    (checkpoint / "training.json").write_text('{"seconds": 3}')
    (checkpoint / "README.md").write_text("A drafter.")
    assert folder_digest(checkpoint) == before


def test_large_files_are_sampled_all_over(checkpoint, monkeypatch):
    for name, value in (("_WHOLE", 1000), ("_PIECES", 50), ("_PIECE", 8)):
        monkeypatch.setattr(weights, name, value)
    path = checkpoint / "model.safetensors"
    digests = {folder_digest(checkpoint)}
    stride = path.stat().st_size // 50
    # In the header; in the first, a middle and the last piece.
    places = [30, 8 + 10 * stride, 8 + 31 * stride + 7, 8 + 49 * stride]
    for place in places:
        flip(path, place)
        digests.add(folder_digest(checkpoint))
    assert len(digests) == 1 + len(places)


@pytest.mark.parametrize(
    ("recipe", "overrides", "read"),
    [
        ("tiny-plain", {}, {}),
        ("tiny-treeflash", {}, {"drafter.checkpoint": "tiny-treeflash"}),
        (
            "tiny-treeflash",
            {"refiner": {"checkpoint": "treeflash.testing:models/tiny-treeflash"}},
            {"drafter.checkpoint": "tiny-treeflash", "refiner.checkpoint": "tiny-treeflash"},
        ),
        ("tiny-draft-model", {}, {"drafter.model": "tiny-target"}),
    ],
)
def test_what_a_recipe_reads(recipe, overrides, read, models):
    registry = Registry.load()
    found = weights_of(Recipe.load(recipe, registry, overrides), registry)
    assert found == {key: folder_digest(models / name) for key, name in read.items()}
