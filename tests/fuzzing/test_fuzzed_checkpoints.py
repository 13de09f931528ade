"""Damaged checkpoints of drafters: each decodes the target's own text, or is refused with one error."""

import json
import struct
from pathlib import Path

import pytest

import treeflash.testing
from treeflash.components.builders.frontier import Frontier
from treeflash.components.builders.marginal import Marginal
from treeflash.components.builders.top_m import TopM
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.components.refiners.swiglu import SwiGlu
from treeflash.engine import Decoder
from treeflash.places import locate
from treeflash.target import load_target

from .cases import try_all
from .mutations import VALUES, mutated_bytes, mutated_value

MODELS = Path(treeflash.testing.__file__).parent / "models"
PROMPT, TOKENS = list(b"Ana has 7"), 6
# Keys that mean something to some drafter, wherever they stand.
KEYS = (
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "layer_types"),
    *("sliding_window", "use_sliding_window", "causal", "sample_from_anchor", "projector_type"),
    *("block_size", "mask_token_id", "target_layer_ids", "architectures", "draft_vocab_size"),
    *("norm_before_residual", "fc_norm", "num_aux_hidden_states", "eagle_config", "dflash_config"),
    *("head_dim", "rms_norm_eps", "hidden_act", "attention_bias", "ar_approximation"),
)
TABLES = ("dflash_config", "treeflash_config", "eagle_config", "rope_parameters")
ROPE = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 10000.0},
)


@pytest.fixture(scope="module")
def target():
    return load_target(MODELS / "tiny-target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def text(target):
    return Decoder(target).generate(PROMPT, max_new_tokens=TOKENS, stop_ids=()).token_ids


def damaged_config(config, chance):
    """Changes to a few keys, or to bytes."""
    for _ in range(chance.choice((0, 0, 1, 1, 2))):
        if not isinstance(config, dict):
            break
        match chance.randrange(3):
            case 0:
                config = mutated_value(config, chance)
            case 1:
                place, key = chance.choice((*TABLES, *[""] * len(TABLES))), chance.choice(KEYS)
                inner = config.get(place, {})
                changed = {**(inner if isinstance(inner, dict) else config), key: chance.choice(VALUES)}
                config = {**config, place: changed} if place else changed
            case _:
                table = chance.choice(ROPE)
                table = mutated_value(table, chance) if chance.random() < 0.5 else table
                names = chance.sample(("rope_parameters", "rope_scaling"), 2)
                config = {**config, names[0]: table}
                if chance.random() < 0.8:
                    config.pop(names[1], None)
    data = json.dumps(config).encode()
    return mutated_bytes(data, chance) if chance.random() < 0.05 else data


def damaged_weights(data, chance):
    """Changes to the header's entries, to its bytes, or to values."""
    size = struct.unpack("<Q", data[:8])[0]
    header, values = data[8 : 8 + size], data[8 + size :]
    match chance.randrange(10):
        case 0:
            header = json.dumps(mutated_value(json.loads(header), chance)).encode()
        case 1:
            # Names and shapes alone, so that the file is still one.
            entries = json.loads(header)
            name = chance.choice([key for key in entries if key != "__metadata__"])
            entry = entries.pop(name)
            entry["dtype"] = chance.choice(("F32", "I32", "BF16", "F8_E4M3", "BOOL"))
            entry["shape"] = chance.choice((entry["shape"], entry["shape"][::-1], [1, *entry["shape"]], []))
            entries[chance.choice((name, f"model.{name}", name[:-1], f"ar_approximation.{name}", ""))] = entry
            header = json.dumps(entries).encode()
        case 2:
            return mutated_bytes(data[: 8 + size], chance) + values
        case 3:
            changed = bytearray(values)
            for _ in range(chance.choice((1, 20, 2000))):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            values = bytes(changed)
        case 4:
            return data[: chance.randrange(len(data))]
        case _:
            return data
    return struct.pack("<Q", len(header)) + header + values


def write(folder, source, chance, shortlist=None):
    """A damaged copy of a checkpoint, in one file or, by an index, in that one all the same."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_bytes(damaged_config(config, chance))
    data = damaged_weights((source / "model.safetensors").read_bytes(), chance)
    if chance.random() < 0.2:
        (folder / "model-00001-of-00001.safetensors").write_bytes(data)
        index = {"metadata": {}, "weight_map": {"fc.weight": "model-00001-of-00001.safetensors"}}
        index = mutated_value(index, chance) if chance.random() < 0.3 else index
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (folder / "model.safetensors").write_bytes(data)
    if shortlist is not None:
        listed = mutated_value(shortlist, chance) if chance.random() < 0.5 else shortlist
        (folder / "shortlist.json").write_text(json.dumps(listed))


def test_block_drafters(tmp_path, fuzz_cases, target, text):
    def attempt(case, chance):
        folder, refined = tmp_path / f"case-{case}", chance.random() < 0.5
        listed = {"token_ids": list(range(32, 120))} if chance.random() < 0.3 else None
        write(folder, MODELS / ("tiny-treeflash" if refined else "tiny-dflash"), chance, listed)
        drafter = DFlash.from_checkpoint(folder, target)
        parts = (Marginal(), NoRefiner())
        if refined:
            builder = chance.choice((TopM(branching=4, children=4), Frontier(children=4)))
            parts = builder, SwiGlu.from_checkpoint(folder, target)
        found = Decoder(target, drafter, *parts).generate(PROMPT, max_new_tokens=TOKENS, stop_ids=())
        assert found.token_ids == text
        for file in folder.iterdir():
            file.unlink()

    try_all(fuzz_cases, attempt, named=f"{tmp_path}/case-{{case}}")


def test_eagle_heads(tmp_path, fuzz_cases, target, text):
    drafters = pytest.importorskip("treeflash_eagle3.drafter")

    def attempt(case, chance):
        folder = tmp_path / f"case-{case}"
        write(folder, locate("treeflash_eagle3:tiny"), chance)
        drafter = drafters.Eagle3.from_checkpoint(folder, target)
        found = Decoder(target, drafter).generate(PROMPT, max_new_tokens=TOKENS, stop_ids=())
        assert found.token_ids == text

    try_all(fuzz_cases, attempt, named=f"{tmp_path}/case-{{case}}")
