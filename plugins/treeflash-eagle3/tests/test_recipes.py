"""The package's recipes: found by name, sound, and one that decodes without a download."""

import json
import subprocess
import sys

import pytest
import torch
from treeflash_eagle3.drafter import Eagle3
from treeflash_eagle3.trainable import Eagle3Trainable

from treeflash.components.selectors.opt_tree import OptTree
from treeflash.engine import Decoder
from treeflash.errors import RecipeError
from treeflash.plugins import Registry
from treeflash.recipe import Recipe
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model
from treeflash.testing.reference import reference_text
from treeflash.training.training_recipe import TrainingRecipe


@pytest.fixture(scope="module")
def registry():
    return Registry.load()


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_qwen3_recipes_name_the_public_heads_and_their_tree(registry, size):
    recipe = Recipe.load(f"qwen3-{size}-eagle3", registry)
    assert recipe.target.model == f"Qwen/Qwen3-{size.upper()}"
    assert recipe.parts["drafter"].options.checkpoint == f"AngelSlim/Qwen3-{size.upper()}_eagle3"
    assert recipe.parts["drafter"].component is Eagle3
    assert recipe.parts["selector"].options == OptTree(59, beam=10)
    assert recipe.parts.keys() == {"drafter", "selector", "verifier"}


def test_a_head_of_the_qwen3_heads_proportions_decodes(files, tmp_path):
    """In small: 36 layers, queries wider than the state, a padded vocabulary, weights in half precision."""
    target = wrap_model(
        tiny_model("qwen3", vocab_size=1010, num_hidden_layers=36, hidden_size=32, scale=1.0, head_dim=16)
    )
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 1008,
        "draft_vocab_size": 320,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
    }
    files.config |= {**sizes, "attention_bias": False, "attention_dropout": 0.0, "use_cache": True}
    files.config["architectures"] = ["Eagle3LlamaForCausalLM"]
    random = torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (32, 96),
        "lm_head.weight": (320, 32),
        "midlayer.self_attn.q_proj.weight": (128, 64),
        "midlayer.self_attn.k_proj.weight": (32, 64),
        "midlayer.self_attn.v_proj.weight": (32, 64),
        "midlayer.self_attn.o_proj.weight": (32, 128),
        "midlayer.mlp.gate_proj.weight": (96, 32),
        "midlayer.mlp.up_proj.weight": (96, 32),
        "midlayer.mlp.down_proj.weight": (32, 96),
    }
    norms = {name: (32,) for name in files.tensors if "norm" in name}
    files.tensors = {
        name: (torch.randn(*shape, generator=random) / 4 + (len(shape) == 1)).half()
        for name, shape in (shapes | norms).items()
    }
    ids = torch.randperm(1008, generator=random)[:320].sort().values
    files.tensors["d2t"] = ids - torch.arange(320)
    files.tensors["t2d"] = torch.isin(torch.arange(1008), ids)
    drafter = Eagle3.from_checkpoint(files.write(tmp_path), target, rope_theta=1e4)
    assert drafter.tap_layers == (1, 17, 32)
    found = Decoder(target, drafter, selector=OptTree(59, beam=10)).generate([5, 6, 7], max_new_tokens=12)
    assert list(found.token_ids) == reference_text(target.model, [5, 6, 7], 12)


@pytest.mark.parametrize("name", ["tiny-eagle3-train", "smollm2-eagle3-train"])
def test_training_recipes_are_sound(registry, name):
    recipe = TrainingRecipe.load(name, registry)
    assert recipe.trainable is Eagle3Trainable


def test_the_smollm2_head_has_as_many_weights_as_the_drafter_of_its_package(registry):
    options = TrainingRecipe.load("smollm2-eagle3-train", registry).trainable_options
    hidden, heads, key_heads, width = 576, 9, 3, 64
    attention = (2 * hidden * (heads + 2 * key_heads) + heads * hidden) * width
    mlp = 3 * hidden * options.intermediate_size
    weights = 3 * hidden**2 + attention + mlp + hidden * options.draft_vocab_size
    assert weights == pytest.approx(12e6, rel=0.02)


def treeflash(folder, *arguments):
    """The command, started in a folder."""
    command = [sys.executable, "-m", "treeflash", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_tiny_recipe_decodes_in_any_folder(tmp_path):
    told = ["Ana has 7 apples.", "--max-new-tokens", "60", "--audit", "--json"]
    result = treeflash(tmp_path, "generate", "tiny-eagle3", *told)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["audit"]["identical"]
    assert figures["block_efficiency"] > 3


def test_a_refiner_behind_the_head_is_refused(tmp_path, registry):
    path = tmp_path / "wrong.toml"
    path.write_text('extends = "tiny-eagle3"\n[builder]\nuse = "top-m"\n[refiner]\nuse = "swiglu"\n')
    with pytest.raises(RecipeError) as error:
        Recipe.load(path, registry)
    reason = "expected none, because drafter 'eagle3' gives no hidden states to build on"
    assert f"builder.use: {reason}; found 'top-m'" in str(error.value)
    assert f"refiner.use: {reason}; found 'swiglu'" in str(error.value)
