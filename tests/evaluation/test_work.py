"""Work is counted operation by operation: products by their formula, bytes by their tensors."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from treeflash.engine import Decoder
from treeflash.evaluation.work import Work, _Counter, count_work
from treeflash.target import wrap_model
from treeflash.testing.families import tiny_model


def counted(run):
    counter = _Counter()
    with torch.inference_mode(), counter:
        run()
    return counter.work


def test_a_product():
    one, other = torch.zeros(3, 8), torch.zeros(8, 5)
    assert counted(lambda: one @ other) == Work(2 * 3 * 8 * 5, 4 * (24 + 40 + 15), 1)
    assert counted(lambda: functional.linear(one, other.T)).flops == 2 * 3 * 8 * 5


def test_attention():
    queries, keys = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 7, 4)
    work = counted(lambda: functional.scaled_dot_product_attention(queries, keys, keys))
    assert work.flops == 2 * (2 * 2 * 3 * 7 * 4)


def test_what_looks_and_does_not_move():
    tensor = torch.zeros(6, 4)
    assert counted(lambda: tensor[2:].T.unsqueeze(0).view(1, 4, 4)) == Work()
    assert counted(lambda: tensor + 1) == Work(0, 2 * 96, 1)


def test_a_lookup_reads_the_rows_it_takes():
    table, rows = torch.zeros(1000, 4), torch.tensor([3, 5])
    expected = Work(0, 2 * 32 + 16, 1)
    assert counted(lambda: functional.embedding(rows, table)) == expected
    assert counted(lambda: table[rows]) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lean", [False, True])
def test_a_plain_step_multiplies_by_every_weight_once(dtype, lean):
    model = tiny_model("llama", dtype=dtype)
    weights = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Linear))
    work = count_work(Decoder(wrap_model(model, lean=lean)), list(range(5, 15)), max_new_tokens=5)
    assert set(work) == {"verify", "commit"}
    verify = work["verify"]
    # Between 11 and 14 positions, 4 heads of 8, two layers.
    attention = 2 * 4 * 4 * 8
    assert 2 * weights + 11 * attention <= verify.flops <= 2 * weights + 14 * attention
    assert verify.bytes > weights * dtype.itemsize
    assert 30 < verify.calls < 300
    assert work["commit"].flops == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pass_of_our_own_calls_less_than_the_librarys(dtype):
    """How many calls that are depends on how weights are laid out for the processor's instructions."""
    model = tiny_model("llama", dtype=dtype)
    library, own = (
        count_work(Decoder(wrap_model(model, lean=lean)), list(range(5, 15)), max_new_tokens=5)["verify"]
        for lean in (False, True)
    )
    assert own.calls < 0.9 * library.calls
