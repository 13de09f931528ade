"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

from treeflash.plugins import Registry
from treeflash.training.training_recipe import TrainingRecipe

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_there_are_blocks():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_block_runs(block, capsys):
    names = {}
    exec(compile(block, str(README), "exec"), names)
    assert names["result"].statistics.block_efficiency > 1


def test_the_tree_is_the_one_that_is_drawn(command):
    text = README.read_text(encoding="utf-8")
    (tree,) = re.findall(r"^```text\n(\* ' '.*?)^```$", text, re.DOTALL | re.MULTILINE)
    words = ["Ana has 7 apples.", "--show-tree", "--max-new-tokens", "12", "-o", "target.device=cpu"]
    _, out, _ = command("generate", "tiny-treeflash", *words)
    assert tree in out


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        assert "://" in target or (README.parent / target).exists(), target


def test_the_training_recipe_is_one(tmp_path):
    text = README.read_text(encoding="utf-8")
    found = re.findall(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in found if "[train]" in block]
    (tmp_path / "mine-train.toml").write_text(block)
    recipe = TrainingRecipe.load(tmp_path / "mine-train.toml", Registry.load())
    assert recipe.trainable_options.mask_token_id == 151669
