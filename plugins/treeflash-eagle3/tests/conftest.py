"""The tiny target, the golden head for it, and the head written out without a batch, a cache or a mask."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treeflash.places import locate
from treeflash.target import HuggingFaceTarget, load_target

GOLDEN = Path(__file__).parent / "golden"

# Tiny models gain nothing from threads, and lose much when other processes run.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the commands that tests start


@attrs.define
class HeadFiles:
    """What a checkpoint folder holds, to be changed before it is written."""

    config: dict
    tensors: dict[str, Tensor]

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        save_file(self.tensors, folder / "model.safetensors")
        return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the golden head and of what the authors' code makes of it."""
    return GOLDEN


@pytest.fixture(scope="session")
def tiny_target() -> HuggingFaceTarget:
    return load_target(locate("treeflash.testing:models/tiny-target"), dtype="float32", device="cpu")


@pytest.fixture
def files() -> HeadFiles:
    """The golden head."""
    folder = GOLDEN / "tiny-eagle3"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return HeadFiles(config, load_file(folder / "model.safetensors"))


@pytest.fixture(scope="session")
def slow_head() -> Callable[..., Tensor]:
    """The head's output at the end of a sequence of tokens, each with the state before it.

    Every link of a chain runs over the whole sequence again, and attention is a loop over heads.
    """

    def last_output(network, embedded: list[Tensor], states: list[Tensor]) -> Tensor:
        config, weights = network.config, dict(network.named_parameters())

        def linear(name: str, vectors: Tensor) -> Tensor:
            return vectors @ weights[f"{name}.weight"].T

        def norm(name: str, vectors: Tensor) -> Tensor:
            mean = vectors.pow(2).mean(dim=-1, keepdim=True)
            return vectors / torch.sqrt(mean + config.rms_norm_eps) * weights[f"{name}.weight"]

        def turned(vectors: Tensor) -> Tensor:
            """Each pair of one half and the other is a complex number, turned by its position."""
            theta, width = config.rope_parameters["rope_theta"], config.head_dim
            speed = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            angle = torch.arange(len(vectors), dtype=torch.float64)[:, None, None] * speed
            low, high = vectors.chunk(2, dim=-1)
            cos, sin = angle.cos().to(vectors), angle.sin().to(vectors)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

        state = torch.stack(states)
        inputs = [
            norm("midlayer.input_layernorm", torch.stack(embedded)),
            norm("midlayer.hidden_norm", state),
        ]
        pairs = torch.cat(inputs, dim=-1)
        queries, keys, values = (
            linear(f"midlayer.self_attn.{name}_proj", pairs).view(len(pairs), -1, config.head_dim)
            for name in "qkv"
        )
        queries, keys = turned(queries), turned(keys)
        shared = config.num_attention_heads // config.num_key_value_heads
        mixed = []
        for head in range(config.num_attention_heads):
            scores = keys[:, head // shared] @ queries[-1, head] / config.head_dim**0.5
            mixed.append(scores.softmax(dim=0) @ values[:, head // shared])
        out = state[-1] + linear("midlayer.self_attn.o_proj", torch.cat(mixed))
        inner = norm("midlayer.post_attention_layernorm", out)
        gate = torch.nn.functional.silu(linear("midlayer.mlp.gate_proj", inner))
        return out + linear("midlayer.mlp.down_proj", gate * linear("midlayer.mlp.up_proj", inner))

    def chain(network, target, taps: Tensor, tokens: list[int], links: list[int]) -> list[Tensor]:
        """Outputs along a chain.

        `taps` are the target's states of all tokens but the last, which is the anchor; `links` are the tokens
        that follow it. Returned are the outputs at the anchor and at each link, `[D]` each.
        """
        states = list(taps @ dict(network.named_parameters())["fc.weight"].T)
        embedded = list(target.embed(torch.tensor(tokens[1:])).detach())
        outputs = [last_output(network, embedded, states)]
        for link in links:
            states.append(outputs[-1])
            embedded.append(target.embed(torch.tensor(link)).detach())
            outputs.append(last_output(network, embedded, states))
        return outputs

    return chain


@pytest.fixture(scope="session")
def slow_logits() -> Callable[..., Tensor]:
    """What the head says of its vocabulary, `[V']`, given an output."""

    def slow_logits(network, output: Tensor) -> Tensor:
        normed = output / torch.sqrt(output.pow(2).mean() + network.config.rms_norm_eps)
        return network.lm_head.weight @ (normed * network.norm.weight)

    return slow_logits
