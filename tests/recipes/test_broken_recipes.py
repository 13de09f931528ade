"""Broken recipes and checkpoints, one of a kind, each with the whole message that it is refused with.

`test_recipe_faults.py` and `test_checkpoint_faults.py` go through the variants of each; this table is what a
user reads: the file, the place in it, what was expected and found, and the nearest valid choice.
"""

import json
import re
import shutil
import sys

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

import treeflash
from treeflash.components.drafters.dflash_network import DFlashNetwork
from treeflash.errors import TreeflashError

TREE = 'extends = "tiny-treeflash"\n'
MINE = f'{TREE}[drafter]\ncheckpoint = "drafter"\n'
PLAIN = 'extends = "tiny-plain"\n'
NETWORK = {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@attrs.frozen
class Broken:
    """A recipe, the message about it, what is done to the checkpoint beside it, and other files there.

    In the message `{there}` is the folder, `<reason>` a library's words.
    """

    recipe: str
    message: str
    checkpoint: object = None
    files: dict[str, str] = attrs.Factory(dict)


def config(**changes):
    """Changes what the checkpoint's config says."""

    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def tensors(change_them):
    """Changes the checkpoint's weights."""

    def change(folder):
        weights = load_file(folder / "model.safetensors")
        change_them(weights)
        save_file(weights, folder / "model.safetensors")

    return change


def of_a_narrower_target(folder):
    """A drafter that is right in itself."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, **NETWORK}
    network = DFlashNetwork(Qwen3Config(**sizes), 4)
    save_file(network.state_dict(), folder / "model.safetensors")
    config(**sizes, layer_types=["full_attention"])(folder)


def truncated(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.zeros(1)}, folder / "pytorch_model.bin")


def without_one_and_with_a_short_one(weights):
    del weights["model.fc.weight"]
    weights["model.norm.weight"] = torch.ones(63)


TABLES = "builder, drafter, refiner, selector, target, verifier"
BROKEN = {
    "misspelled table": Broken(
        f"{TREE}[buildr]\nchildren = 4",
        f"{{there}}/mine.toml: unknown table [buildr]; did you mean 'builder'? (known: {TABLES})",
    ),
    "misspelled key": Broken(
        f"{TREE}[selector]\nbugdet = 4",
        "{there}/mine.toml: selector.bugdet: unknown key; did you mean 'budget'? "
        "(known: beam, budget, depth)",
    ),
    "misspelled component": Broken(
        f'{TREE}[refiner]\nuse = "swi-glu"',
        "{there}/mine.toml: refiner.use: no refiner is called 'swi-glu'; did you mean 'swiglu'? "
        "(known: bilinear, linear, none, swiglu, two-token)",
    ),
    "misspelled target": Broken(
        f'{TREE}[target]\nmodel = "acme-modl"',
        "{there}/mine.toml: target.model: no folder, hub name or target is called 'acme-modl'; "
        "did you mean 'acme-model'? (known: acme-model)",
    ),
    "wrong type": Broken(
        f'{TREE}[selector]\nbudget = "many"',
        "{there}/mine.toml: selector.budget: expected an integer, found 'many'",
    ),
    "out of range": Broken(
        f"{TREE}[selector]\nbudget = 5000",
        "{there}/mine.toml: selector.budget: expected <= 4096, found 5000",
    ),
    "missing key": Broken(
        f'{PLAIN}[drafter]\nuse = "dflash"\n[builder]\nuse = "top-m"\n[refiner]\nuse = "swiglu"',
        "{there}/mine.toml: drafter.checkpoint: expected a string, found nothing",
    ),
    "missing file": Broken(
        'extends = "bases/mine.toml"',
        "{there}/mine.toml: extends: no recipe file {there}/bases/mine.toml",
    ),
    "no TOML": Broken(
        f"{TREE}[selector\nbudget = 3",
        "{there}/mine.toml: not valid TOML (<reason> (at line 2, column 10))",
    ),
    "two errors at once": Broken(
        f'{TREE}[selector]\nbugdet = 4\n[builder]\nbranching = "x"',
        "{there}/mine.toml: 2 faults\n"
        "  - builder.branching: expected an integer, found 'x'\n"
        "  - selector.bugdet: unknown key; did you mean 'budget'? (known: beam, budget, depth)",
    ),
    "cycle in extends": Broken(
        'extends = "other.toml"',
        "{there}/mine.toml: extends itself (mine.toml -> other.toml -> mine.toml)",
        files={"other.toml": 'extends = "mine.toml"'},
    ),
    "unknown base": Broken(
        'extends = "tiny-treflash"',
        "{there}/mine.toml: extends: no recipe is called 'tiny-treflash'; did you mean "
        "'tiny-treeflash'? (treeflash recipes list names all)",
    ),
    "refiner behind none": Broken(
        f'{PLAIN}[refiner]\nuse = "swiglu"',
        "{there}/mine.toml: refiner.use: expected none, because drafter 'none' gives no hidden states to "
        "build on; found 'swiglu'",
    ),
    "builder missing behind dflash": Broken(
        f'{PLAIN}[drafter]\nuse = "dflash"\ncheckpoint = "drafter"\n[refiner]\nuse = "none"',
        "{there}/mine.toml: builder.use: expected one, because drafter 'dflash' drafts blocks; found none "
        "(known: frontier, marginal, top-m)",
    ),
    "two-token refiner behind a builder of no contexts": Broken(
        f'{TREE}[builder]\nuse = "marginal"\n[refiner]\nuse = "two-token"',
        "{there}/mine.toml: builder.use: expected contexts of 2 tokens, which refiner 'two-token' looks at; "
        "found 'marginal', which lays out contexts of 0",
    ),
    "checkpoint that is not there": Broken(
        f'{TREE}[drafter]\ncheckpoint = "drafters"',
        "{there}/mine.toml: drafter.checkpoint: expected a folder, package:path or hub name, found "
        "'drafters', which is none",
    ),
    "misspelled package path": Broken(
        f'{TREE}[drafter]\ncheckpoint = "treeflash.testing:models/tiny-treflash"',
        "{there}/mine.toml: drafter.checkpoint: 'treeflash.testing:models/tiny-treflash': the package has no "
        "folder 'models/tiny-treflash'; did you mean 'tiny-treeflash'? (known: tiny-bilinear, tiny-dflash, "
        "tiny-linear, tiny-target, tiny-treeflash, tiny-two-token)",
    ),
    "no such dtype": Broken(
        f'{TREE}[target]\ndtype = "flaot32"',
        "{there}/mine.toml: target.dtype: expected auto, fastest, float32, float64, bfloat16 or float16, "
        "found 'flaot32'; did you mean 'float32'?",
    ),
    "no such device": Broken(
        f'{TREE}[target]\ndevice = "gpu"',
        "{there}/mine.toml: target.device: expected auto or a device that is present (<reason>), "
        "found 'gpu' (<reason>)",
    ),
    "a key outside any table": Broken(
        f"budget = 3\n{TREE}",
        "{there}/mine.toml: budget: expected it inside a table, found it outside of all "
        f"(known tables: {TABLES})",
    ),
    "drafter of another target": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter: hidden_size: expected the target's 64, found 32",
        of_a_narrower_target,
    ),
    "another RoPE base": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter: rope_theta: expected the target's 10000.0, found 1000000.0",
        config(rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ),
    "refiner of another kind": Broken(
        f'{MINE}[refiner]\nuse = "linear"',
        "{there}/mine.toml: {there}/drafter: treeflash_config.ar_approximation: expected 'linear', found "
        "'swiglu'",
        config(),
    ),
    "truncated safetensors": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter/model.safetensors: not a readable safetensors file (<reason>); "
        "was it written or copied to its end?",
        truncated,
    ),
    "pickle": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter: expected model.safetensors, found pytorch_model.bin; pickled "
        "weights can run code and are not read: load them where you trust them, and write them "
        "again with save_pretrained or safetensors.torch.save_file",
        pickled,
    ),
    "NaN weights": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter: backbone tensor model.fc.weight holds values that are "
        "not finite",
        tensors(lambda weights: weights["model.fc.weight"][0].fill_(torch.nan)),
    ),
    "a tensor missing and one of the wrong shape": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter: 2 faults\n"
        "  - backbone tensor fc.weight is missing\n"
        "  - backbone tensor model.norm.weight: expected shape [64], found [63]",
        tensors(without_one_and_with_a_short_one),
    ),
    "config of more layers than there are": Broken(
        MINE,
        "{there}/mine.toml: {there}/drafter: num_hidden_layers: expected the 2 whose tensors are stored, "
        "found 5",
        config(num_hidden_layers=5, layer_types=["full_attention"] * 5),
    ),
    "training recipe": Broken(
        'extends = "tiny-train"',
        "{there}/mine.toml: this recipe trains a drafter (treeflash train); expected one that decodes, like "
        "the one that such a run leaves beside the drafter",
    ),
}

PLUGIN = """
from pathlib import Path
from treeflash.hookspecs import hookimpl

@hookimpl
def treeflash_targets():
    return {"acme-model": Path}
"""


@pytest.fixture(autouse=True)
def one_plugin(tmp_path_factory, monkeypatch):
    """What is installed decides what is known: here one plugin, which has a target, and no other."""
    site = tmp_path_factory.mktemp("site")
    info = site / "acme_targets-1.0.dist-info"
    info.mkdir()
    (site / "acme_targets_plugin.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-targets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[treeflash]\nacme = acme_targets_plugin\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("TREEFLASH_PLUGINS", "acme-targets")
    yield
    sys.modules.pop("acme_targets_plugin", None)


@pytest.mark.parametrize("case", BROKEN)
def test_the_whole_message(case, tmp_path, models):
    broken = BROKEN[case]
    recipe = tmp_path / "mine.toml"
    recipe.write_text(broken.recipe)
    for name, text in broken.files.items():
        (tmp_path / name).write_text(text)
    if broken.checkpoint is not None:
        broken.checkpoint(shutil.copytree(models / "tiny-treeflash", tmp_path / "drafter"))
    with pytest.raises(TreeflashError) as error:
        treeflash.load(recipe)
    expected = re.escape(broken.message.format(there=tmp_path))
    expected = expected.replace("<reason>", r"[^\n]+")
    found = str(error.value)
    assert re.fullmatch(expected, found), found
