"""`treeflash check`: whether a recipe would decode here, and what it would take."""

import functools
import json
import re
import shutil

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import treeflash
from treeflash.components.verifiers.sdpa_tree import SdpaTree
from treeflash.engine import Decoder
from treeflash.plugins import Registry
from treeflash.recipe_tables import find
from treeflash.target import load_target, loading

TREE = 'extends = "tiny-treeflash"\n[drafter]\ncheckpoint = "drafter"\n'


@pytest.fixture
def run(command):
    """Exit status and both outputs, as a user sees them."""
    return functools.partial(command, "check")


@pytest.fixture
def lines(run):
    """What is said of a recipe that fits: a text behind each name, the first line under ""."""

    def lines(*arguments):
        status, out, err = run(*arguments, "-o", "target.device=cpu")
        assert (status, err) == (0, "")
        first, *rest = out.splitlines()
        return {"": first, **dict(line.strip().split(": ", 1) for line in rest if ": " in line)}

    return lines


def megabytes(module):
    return sum(weight.nbytes for weight in module.parameters()) / 1e6


def cache_megabytes(target, positions):
    """What a cache with this room really holds."""
    state = target.start(1, positions, ())
    target.prefill(state, torch.zeros(1, 1, dtype=torch.int64))
    return sum(part.nbytes for layer in state.cache.layers for part in (layer.keys, layer.values)) / 1e6


def test_a_lossy_verifier_is_marked(run, monkeypatch):
    told = "verifier: sdpa-tree, lossy on purpose: the text may differ from the target's own\n"
    assert told not in run("tiny-plain")[1]
    monkeypatch.setattr(SdpaTree, "lossless", False)
    assert told in run("tiny-plain")[1]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny-dflash", "tiny-treeflash"])
def test_the_facts_are_those_of_the_target_and_the_drafter(name, dtype, lines):
    found = lines(name, "--dtype", dtype)
    decoder = treeflash.load(name, target={"dtype": dtype, "device": "cpu"})
    target, drafter = decoder.target, decoder.drafter
    assert found[""] == f"{find(name, Registry.load())}: fits"
    assert found["target"] == (
        f"{target.num_layers} layers, hidden size {target.hidden_size}, {target.vocab_size} tokens, "
        f"{target.max_positions} positions, {dtype} on cpu"
    )
    laid_out = dtype == "bfloat16" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    copied = sum(part.weight.nbytes for part in target.model.modules() if isinstance(part, torch.nn.Linear))
    more = f" and {copied / 1e6:.0f} MB of them in other layouts" if laid_out else ""
    assert found["memory"] == (
        f"{megabytes(target.model):.0f} MB of weights{more}, {cache_megabytes(target, 1024):.1f} MB of cache "
        "for 1024 tokens"
    )
    layers = ", ".join(map(str, drafter.tap_layers))
    assert found["drafter"] == (
        f"dflash, {megabytes(drafter.network):.1f} MB of weights, {drafter.max_depth} levels, "
        f"target layers read: {layers}"
    )
    refined = (
        f"swiglu, {megabytes(decoder.refiner.network):.1f} MB of weights"
        if name == "tiny-treeflash"
        else "none"
    )
    assert found["refiner"] == refined


def test_graphs_are_counted(lines):
    copied = re.search(
        r"weights and (\d+) MB of",
        lines("tiny-plain", "-o", "target.compile=true", "--dtype", "float64")["memory"],
    )
    model = treeflash.load("tiny-plain", target={"dtype": "float64"}).target.model
    maps = [part.weight.nbytes for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert int(copied[1]) == round(2 * sum(maps) / 1e6)


def test_every_part_is_named(run, lines):
    assert list(lines("tiny-treeflash")) == [
        "",
        "target",
        "memory",
        "drafter",
        "builder",
        "refiner",
        "selector",
        "verifier",
    ]
    found = lines("tiny-treeflash", "-o", "selector.use=chain", "-o", "builder.use=frontier")
    assert (found["selector"], found["builder"], found["verifier"]) == ("chain", "frontier", "sdpa-tree")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_attention_that_passed_the_probe_is_named(attention, run, monkeypatch):
    fault = "it is not this one"
    monkeypatch.setattr(loading, "probe", lambda target: None if target.attention == attention else fault)
    _, out, _ = run("tiny-plain", "-o", "target.device=cpu")
    assert f"\n    verified in trees with {attention} attention\n" in out


def test_the_cache_is_as_wide_as_the_heads(lines, tmp_path, capfd):
    # Of a model whose heads are wider than its hidden states are shared out over them.
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=48,
        num_hidden_layers=3,
        vocab_size=50,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    capfd.readouterr()  # the library shows a bar
    found = lines("tiny-plain", "-o", f"target.model={tmp_path / 'model'}")
    target = load_target(tmp_path / "model", dtype="float32", device="cpu")
    assert found["target"].startswith("3 layers, hidden size 32, 50 tokens, ")
    assert f", {cache_megabytes(target, 1024):.1f} MB of cache" in found["memory"]


def test_plain_decoding_reads_and_drafts_nothing(lines):
    assert lines("tiny-plain")["drafter"] == "none, 0 levels, target layers read: none"


def test_other_sizes_give_other_facts(lines, tmp_path, models):
    model = shutil.copytree(models / "tiny-target", tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 96}))
    found = lines("tiny-plain", "-o", f"target.model={model}")
    assert ", 96 positions, " in found["target"]


def test_nothing_is_generated(lines, monkeypatch):
    monkeypatch.setattr(Decoder, "stream", None)
    assert lines("tiny-treeflash")[""].endswith(": fits")


@pytest.fixture
def misfit(tmp_path, models):
    """A recipe with a drafter whose config is changed."""

    def misfit(**changes):
        config = shutil.copytree(models / "tiny-treeflash", tmp_path / "drafter") / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
        recipe = tmp_path / "mine.toml"
        recipe.write_text(TREE)
        return recipe

    return misfit


def test_a_drafter_of_another_target_is_one_message(misfit, run, tmp_path):
    rope = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    status, out, err = run(misfit(num_target_layers=36, vocab_size=96, **rope))
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        f"treeflash: {tmp_path}/mine.toml: {tmp_path}/drafter: 3 faults",
        "  - num_target_layers: expected the target's 4, found 36",
        "  - rope_theta: expected the target's 10000.0, found 1000000.0",
        "  - vocab_size: expected the target's 128, found 96",
    ]


MISTAKES = {
    "misspelled recipe": (["tiny-treflash"], r"no recipe is called 'tiny-treflash'; did you mean .*"),
    "missing file": (["nowhere.toml"], r"no recipe file nowhere\.toml"),
    "training recipe": (["tiny-train"], r".*tiny-train\.toml: this recipe trains a drafter.*"),
    "misspelled key": (
        ["tiny-ddtree", "-o", "selector.budgt=3"],
        r".*: selector\.budgt: unknown key; did .*",
    ),
    "no dtype": (
        ["tiny-plain", "-o", "target.dtype=int8"],
        r".*: target.dtype: expected auto, .*, found 'int8'",
    ),
    "no target": (
        ["tiny-plain", "-o", "target.model=nowhere"],
        r".*no folder, hub name or target .*'nowhere'.*",
    ),
    "no target at all": (
        ["tiny-plain", "-o", "target.model=treeflash.testing:models/tiny-dflash"],
        r".*tiny-dflash' cannot be loaded: .*",
    ),
    "no checkpoint": (
        ["tiny-dflash", "-o", "drafter.checkpoint=nowhere"],
        r".*: drafter.checkpoint: expected .*, found 'nowhere'.*",
    ),
    "no refiner in the file": (
        ["tiny-dflash", "-o", "refiner.use=linear", "-o", "builder.use=top-m"],
        r".*'linear', found 'swiglu'",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistake(case, run):
    arguments, message = MISTAKES[case]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"treeflash: {message}\n", err), err


@pytest.mark.parametrize("arguments", [[], ["tiny-plain", "tiny-dflash"], ["tiny-plain", "--budget", "3"]])
def test_usage(arguments, run):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "Error: " in err
    assert "Traceback" not in err
