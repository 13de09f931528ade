"""No change of a weight has the checksums that it had before."""

import pytest
import torch

from treeflash import seen
from treeflash.seen import Seen, checksums


def swap_rows(weight):
    weight[[2, 5]] = weight[[5, 2]]


def swap_columns(weight):
    weight[:, [4, 8]] = weight[:, [8, 4]]


def swap_blocks(weight):
    """Every row and column keeps its sum."""
    weight[0, 0], weight[0, 4], weight[4, 0], weight[4, 4] = (float(part) for part in (1, 0, 0, 1))


def negate_columns(weight):
    weight[:, [3, 7]] *= -1


def negate_zero(weight):
    weight[1, 1] = -0.0


CHANGES = {
    "row": lambda weight: weight[3].zero_(),
    "rows swapped": swap_rows,
    "columns swapped": swap_columns,
    "corners swapped": swap_blocks,
    "columns negated": negate_columns,
    "a zero negated": negate_zero,
    "rolled": lambda weight: weight.copy_(weight.roll(1)),
}


@pytest.fixture(params=[1 << 22, 24], ids=["one piece", "many pieces"])
def pieces(request, monkeypatch):
    monkeypatch.setattr(seen, "_PIECE", request.param)


def a_weight(dtype):
    weight = torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1, 1] = 0.0
    weight[0, 0], weight[0, 4], weight[4, 0], weight[4, 4] = 0, 1, 1, 0
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_changes_behind_torchs_back_are_told(pieces, change, dtype):
    weight = torch.nn.Parameter(a_weight(dtype))
    before, known = checksums([weight]), Seen([weight])
    CHANGES[change](weight.data)
    assert known.is_of([weight])
    assert checksums([weight]) != before


def test_every_bit_counts(pieces):
    weight = a_weight(torch.bfloat16)[:2]
    bits, before = weight.view(torch.uint8), checksums([weight])
    for place in range(bits.numel()):
        for bit in range(8):
            bits.view(-1)[place] ^= 1 << bit
            assert checksums([weight]) != before
            bits.view(-1)[place] ^= 1 << bit
    assert checksums([weight]) == before


def test_they_are_the_same_by_any_number_of_threads(pieces, monkeypatch):
    weights = [a_weight(torch.float32), torch.empty(0), torch.tensor(3.0), a_weight(torch.bfloat16).T]
    alone = checksums(weights)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert checksums(weights) == alone
    assert checksums([weight.clone() for weight in weights]) == alone
    assert len(alone) == 4
    assert checksums([]) == []
    assert checksums([a_weight(torch.float32).to("meta")]) == [()]
