"""One text learned by heart: drafts of it are right to the last slot, simulated and decoded."""

import json
import re

import pytest

import treeflash
from treeflash.engine import Decoder
from treeflash.training.session import Listener

BLOCK = 8
# The first token comes from reading the prompt, the others in whole blocks.
TOKENS = 1 + 7 * BLOCK


@pytest.mark.parametrize("refiner", ["swiglu", "none"])
def test_learned_by_heart(run, write_data, cpu_target, tmp_path, refiner):
    prompt = cpu_target.text.encode_chat("Ana has 7 coins. Ana")
    told = {"max_new_tokens": TOKENS, "stop_ids": ()}
    answer = list(Decoder(cpu_target).generate(prompt, **told).token_ids)
    rows = [("train", prompt, answer), ("heldout", prompt, answer)]
    data = write_data(tmp_path / "data", cpu_target.digest(), rows)
    said: list[str] = []
    out = run(
        tmp_path / "out",
        folders=[data],
        listener=Listener(say=said.append),
        refiner={"use": refiner},
        drafter={"block_size": BLOCK, "intermediate_size": 64, "anchors": TOKENS},
        data={"batch_size": 1},
        optimizer={"lr": 5e-3},
        train={"steps": 120},
    )
    measured = json.loads((out / "drafter" / "training.json").read_text())["heldout"]
    for summary in measured.values():
        assert summary["block_efficiency"] > 0.9 * BLOCK
        assert len(summary["top1"]) == BLOCK - 1
        assert min(summary["top1"]) > 0.9
    decoded = re.search(r"emits (\S+) tokens a step .* simulated (\S+)", said[-1])
    assert decoded is not None, said
    assert not said[-1].startswith("warning")
    assert float(decoded[1]) == pytest.approx(float(decoded[2]), rel=0.15)
    for selector in ("opt-tree", "chain"):
        decoder = treeflash.load(out / "drafter" / "recipe.toml", selector={"use": selector})
        found = decoder.generate(prompt, **told)
        assert list(found.token_ids) == answer
        assert found.statistics.block_efficiency > 0.9 * BLOCK
