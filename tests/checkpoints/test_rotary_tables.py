"""Rotary positions: stated once, or alike in every place; never half of what a config says."""

import pytest
from transformers import Qwen3Config

from treeflash.checkpoints.rope import rope_faults, rope_parameters
from treeflash.components.builders.marginal import Marginal
from treeflash.components.drafters.dflash import DFlash
from treeflash.components.refiners.none import NoRefiner
from treeflash.engine import Decoder
from treeflash.errors import CheckpointError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
CONTRADICTIONS = {
    "two bases": (
        {"rope_theta": 10000, "rope_parameters": {"rope_type": "default", "rope_theta": 5}},
        "rope_parameters.rope_theta: expected the 10000 of rope_theta, found 5",
    ),
    "two bases in tables": (
        {"rope_parameters": PLAIN, "rope_scaling": {"rope_theta": 5.0}},
        "rope_scaling.rope_theta: expected the 10000.0 of rope_parameters.rope_theta, found 5.0",
    ),
    "two tables": (
        {"rope_parameters": PLAIN, "rope_scaling": YARN},
        'rope_scaling: expected what rope_parameters says, {"rope_type": "default"}, or no such key; found '
        '{"rope_type": "yarn", "factor": 4.0}',
    ),
    "two factors": (
        {"rope_parameters": {**YARN, "factor": 2.0}, "rope_scaling": YARN},
        'rope_scaling: expected what rope_parameters says, {"rope_type": "yarn", "factor": 2.0}, or no such '
        'key; found {"rope_type": "yarn", "factor": 4.0}',
    ),
    "two types": (
        {"rope_scaling": {**YARN, "type": "linear"}},
        'rope_scaling: expected one type, found "yarn" and, as type, "linear"',
    ),
    "two lengths": (
        {"original_max_position_embeddings": 32, "rope_parameters": YARN},
        "rope_parameters.original_max_position_embeddings: expected the 32 of "
        "original_max_position_embeddings, found 64",
    ),
    "part of a head": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: expected 1, found 0.5 (heads turned in part are not supported)",
    ),
    "part of a head in a table": (
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor: expected 1, found 0.5 (heads turned in part are not",
    ),
    "a table for each kind of layer": (
        {"rope_parameters": {"full_attention": PLAIN}},
        "rope_parameters: expected one table for all layers, found one for each kind of layer",
    ),
    "no table": ({"rope_scaling": 2.0}, "rope_scaling: expected an object, found 2.0"),
    "no base": ({"rope_theta": float("nan")}, "rope_theta: expected a positive number, found NaN"),
    "a base of nothing": ({"rope_theta": 0}, "rope_theta: expected a positive number, found 0"),
    "an endless base": ({"rope_theta": 10**400}, "rope_theta: expected a positive number, found 1000"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_both_places(case):
    config, fault = CONTRADICTIONS[case]
    (found,) = rope_faults(config)
    assert found.startswith(fault)


ALIKE = {
    "beside": {"rope_theta": 5, "rope_scaling": YARN},
    "inside": {"rope_parameters": {**YARN, "rope_theta": 5.0}},
    "both": {"rope_theta": 5.0, "rope_parameters": {**YARN, "rope_theta": 5}, "rope_scaling": None},
    "old name and new": {
        "rope_theta": 5,
        "rope_parameters": YARN,
        "rope_scaling": {"type": "yarn", "factor": 4, "rope_theta": 5},
    },
    "old type": {
        "rope_theta": 5,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "length beside": {
        "rope_theta": 5,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "partial_rotary_factor": 1.0},
        "partial_rotary_factor": 1,
    },
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_is_said_alike_is_read_from_wherever_it_stands(case):
    assert rope_faults(ALIKE[case]) == []
    found = rope_parameters(ALIKE[case])
    found.pop("partial_rotary_factor", None)
    assert found == {**YARN, "rope_theta": 5.0}
    # The library finds the same.
    theirs = Qwen3Config(head_dim=16, max_position_embeddings=64, **ALIKE[case]).rope_parameters
    assert {key: theirs[key] for key in found} == found


def test_nothing_said_is_the_default():
    assert rope_parameters({"original_max_position_embeddings": 32}) == {"rope_type": "default"}


@pytest.fixture
def loaded(checkpoint_files, tmp_path, tiny_target):
    """Writes the tiny drafter with other rotary positions, and reads it."""

    def load(**changes):
        files = checkpoint_files.shipped()
        files.config |= changes
        return DFlash.from_checkpoint(files.write(tmp_path), tiny_target)

    return load


def test_contradictions_are_refused_with_the_checkpoint(loaded):
    with pytest.raises(
        CheckpointError, match=r"rope_parameters\.rope_theta: expected the 10000\.0 of rope_theta"
    ):
        loaded(rope_parameters={"rope_type": "default", "rope_theta": 5})
    with pytest.raises(CheckpointError, match="rope_scaling: expected what rope_parameters says"):
        loaded(rope_scaling=YARN)
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor: expected 1, found 0\.5"):
        loaded(rope_parameters={**YARN, "rope_theta": 1e4, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 3}, "size of tensor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": ["x"] * 8}, "Error|expected"),
        ({"rope_type": "linear", "factor": 0}, "position 0 is turned by something that is not finite"),
    ],
)
def test_a_table_that_fails_far_along_a_text_is_refused_when_it_is_read(changes, reason, loaded):
    table = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64, **changes}
    with pytest.raises(CheckpointError, match=f"rope_parameters cannot be used: .*({reason})"):
        loaded(rope_parameters=table)


def test_scaled_positions_decode(loaded, tiny_target):
    drafter = loaded(rope_parameters={**YARN, "rope_theta": 1e4})
    assert drafter.network.config.rope_parameters["factor"] == 4.0
    prompt = list(range(20, 30))
    parts = {"builder": Marginal(), "refiner": NoRefiner()}
    found = Decoder(tiny_target, drafter, **parts).generate(prompt, max_new_tokens=8)
    assert found.token_ids == Decoder(tiny_target).generate(prompt, max_new_tokens=8).token_ids
