"""Passes made for training: packed texts are the texts, and labels are the model's own logits."""

import pytest
import torch

from treeflash.packed_text import PackedText
from treeflash.target import HuggingFaceTarget
from treeflash.testing.families import FAMILIES, tiny_model

TEXTS = [([3, 7, 9], [4, 5, 6, 8, 2]), ([5], [7, 7, 3]), ([9, 8, 7, 6, 5, 4], [3, 3])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_is_read_as_its_texts(family, device):
    target = HuggingFaceTarget(tiny_model(family).to(device, torch.float64), attention="eager")
    row = PackedText.pack(TEXTS, target.device)
    layers = (0, target.num_layers - 1)
    found = target.read(row.token_ids, row.positions, row.causal_visibility(), layers)
    for (prompt, answer), begin, end in zip(TEXTS, row.bounds, row.bounds[1:], strict=False):
        ids = torch.tensor([prompt + answer], device=target.device)
        alone = target.prefill(target.start(1, 64, layers), ids)
        torch.testing.assert_close(found[begin:end], alone.taps[0], atol=1e-4, rtol=1e-4)
        # The head over the final normed state, finished as the family does, gives the model's own logits.
        normed = found[end - 1, -target.hidden_size :]
        logits = target.finish(target.head(None, target.dtype)(normed))
        torch.testing.assert_close(logits, alone.logits[0, -1], atol=1e-4, rtol=1e-4)


def test_a_head_over_some_tokens(tiny_target):
    columns = torch.tensor([3, 50, 99], device=tiny_target.device)
    normed = torch.randn(4, tiny_target.hidden_size, device=tiny_target.device)
    few = tiny_target.head(columns, torch.float64)(normed)
    assert few.dtype == torch.float64
    torch.testing.assert_close(few.float(), tiny_target.project(normed)[:, columns])
