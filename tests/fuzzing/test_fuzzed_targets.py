"""Damaged folders of targets: each is read and decodes, or is refused with one error that names it."""

import json
import shutil
import struct
import warnings

import pytest
from safetensors.torch import load_file, save_file

from treeflash.engine import Decoder
from treeflash.errors import TreeflashError
from treeflash.target import load_target

from .cases import try_all
from .mutations import mutated_bytes, mutated_value

CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The tiny target's files, and the same with its weights in two shards."""
    single = {path.name: path.read_bytes() for path in (models / "tiny-target").iterdir()}
    folder = tmp_path_factory.mktemp("shards")
    tensors = load_file(models / "tiny-target" / WEIGHTS)
    names, sharded = sorted(tensors), dict(single)
    del sharded[WEIGHTS]
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        sharded[file] = (folder / file).read_bytes()
        weight_map |= dict.fromkeys(part, file)
    sharded[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return single, sharded


def damaged_weights(data, chance):
    """Damage to the header, as bytes or as what it says, or to the length before it."""
    (length,) = struct.unpack("<Q", data[:8])
    header, values = data[8 : 8 + length], data[8 + length :]
    match chance.randrange(4):
        case 0:
            header = mutated_bytes(header, chance)
        case 1:
            header = json.dumps(mutated_value(json.loads(header), chance)).encode()
        case 2:
            return mutated_bytes(data[:8], chance) + data[8:]
        case _:
            values = values[: chance.randrange(len(values))]
    return struct.pack("<Q", len(header)) + header + values


def damaged(files, chance):
    """The files with one to three of them damaged."""
    files = dict(files)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        name = "config.json" if chance.random() < 0.4 else chance.choice(sorted(files))
        data = files.get(name)
        if data is None:
            continue
        if chance.random() < 0.05:
            del files[name]
        elif name.endswith(".safetensors"):
            files[name] = damaged_weights(data, chance)
        elif name.endswith(".json") and chance.random() < 0.75:
            try:
                value = json.loads(data)
            except ValueError:
                continue
            for _ in range(chance.choice((1, 1, 2))):
                value = mutated_value(value, chance)
            files[name] = json.dumps(value).encode()
        else:
            files[name] = mutated_bytes(data, chance)
    return files


def test_target_folders(whole, tmp_path, fuzz_cases):
    def attempt(case, chance):
        folder = tmp_path / f"case-{case}"
        folder.mkdir()
        for name, data in damaged(chance.choice((whole[0], whole[0], whole[1])), chance).items():
            (folder / name).write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                target = load_target(folder, device="cpu")
        except TreeflashError as error:
            if f"target {str(folder)!r}" not in str(error):
                raise AssertionError(f"it does not name the folder: {error}") from error
            raise
        finally:
            shutil.rmtree(folder)
        Decoder(target).generate([2, 65, 110, 97], max_new_tokens=3)
        if target.text is not None:
            target.text.decode(target.text.encode_chat("Ana has 7 apples."))

    try_all(fuzz_cases, attempt)
