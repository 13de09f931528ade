"""Linear maps over blocks are the maps that they were made of."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from treeflash.layouts import Blocks, Linear

LAID_OUT = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def maps(*widths, bias=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [nn.Linear(48, width, bias=bias).to(dtype) for width in widths]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(48,), (1, 1, 48), (2, 7, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("widths", [(33,), (32, 16, 16)], ids=str)
def test_they_are_what_the_maps_are(widths, shape, dtype, bias):
    parts, states = maps(*widths, bias=bias, dtype=dtype), torch.randn(shape).to(dtype)
    with torch.inference_mode():
        found = Blocks(parts)(states)
        expected = torch.cat([part(states) for part in parts], dim=-1)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_columns_of_a_wider_tensor():
    (part,), wide = maps(8), torch.randn(3, 96).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(Blocks([part])(wide[:, 48:]), part(wide[:, 48:].clone()))


@pytest.mark.parametrize("inference", [False, True], ids=["usual", "made while inferring"])
def test_a_changed_weight_is_seen(inference):
    with torch.inference_mode(inference):
        (part,) = maps(5)
    blocks, states = Blocks([part]), torch.randn(2, 48).bfloat16()
    with torch.inference_mode():
        blocks(states)
    with torch.no_grad():
        if inference:
            part.weight = nn.Parameter(part.weight.clone() * 3)
        else:
            part.weight.mul_(3)
    with torch.inference_mode():
        torch.testing.assert_close(blocks(states), functional.linear(states, part.weight))


def test_one_map_of_several_has_a_bias():
    parts = [*maps(5, bias=True), *maps(3), *maps(4, bias=True)]
    states = torch.randn(2, 48).bfloat16()
    with torch.inference_mode():
        expected = torch.cat([part(states) for part in parts], dim=-1)
        torch.testing.assert_close(Blocks(parts)(states), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("change", ["in place", "replaced"])
@pytest.mark.parametrize("which", [0, 1])
def test_a_changed_bias_is_seen(which, change):
    parts, states = maps(5, 3, bias=True), torch.randn(2, 48).bfloat16()
    blocks, part = Blocks(parts), parts[which]
    with torch.inference_mode():
        blocks(states)
    with torch.no_grad():
        if change == "in place":
            part.bias[1] += 3
        else:
            part.bias = nn.Parameter(part.bias + 3)
    with torch.inference_mode():
        expected = torch.cat([part(states) for part in parts], dim=-1)
        torch.testing.assert_close(blocks(states), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(not LAID_OUT, reason="this processor has no bfloat16 products")
def test_a_drafters_map_uses_blocks_while_it_decodes_alone():
    linear, states = Linear(48, 5, bias=False).bfloat16(), torch.randn(2, 48).bfloat16()
    expected = functional.linear(states, linear.weight)
    out = linear(states)
    out.sum().backward()
    assert linear.weight.grad is not None
    with torch.no_grad():
        linear(states)
    (blocks,) = linear._made.values()
    assert blocks.made is None
    with torch.inference_mode():
        found = linear(states)
    assert blocks.made is not None
    torch.testing.assert_close(found, expected.detach(), rtol=1e-2, atol=1e-2)
    # Nothing of it is part of the module.
    assert list(linear.state_dict()) == ["weight"]
    assert [name for name, _ in linear.named_parameters()] == ["weight"]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_sum_to_the_map(dtype, inference):
    linear, states = Linear(48, 5).to(dtype), torch.randn(2, 48).to(dtype)
    with torch.inference_mode(inference), torch.no_grad():
        parts = linear.over(slice(0, 32), states[:, :32]) + linear.over(slice(32, None), states[:, 32:])
        torch.testing.assert_close(parts + linear.bias, linear(states), rtol=2e-2, atol=2e-2)


def test_a_copy_and_a_cast_start_anew():
    linear, states = Linear(48, 5).bfloat16(), torch.randn(2, 48).bfloat16()
    with torch.inference_mode():
        linear(states)
    other = copy.deepcopy(linear)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    with torch.inference_mode():
        assert not other(states).any()
        assert linear(states).any()
        assert linear.float()(states.float()).dtype == torch.float32


def test_what_has_been_used_can_be_written_and_read():
    linear, states = Linear(48, 5).bfloat16(), torch.randn(2, 48).bfloat16()
    with torch.inference_mode():
        expected = linear(states)
        again = pickle.loads(pickle.dumps(linear))
        assert torch.equal(again(states), expected)


@pytest.mark.skipif(not LAID_OUT, reason="this processor has no bfloat16 products")
def test_a_replaced_weight_is_held_until_the_next_call():
    """Another weight in its place in memory, as new as it was, would be taken for it."""
    (part,) = maps(5)
    blocks, states = Blocks([part]), torch.randn(2, 48).bfloat16()
    with torch.inference_mode():
        blocks(states)
        before = weakref.ref(part.weight)
    part.weight = nn.Parameter(torch.zeros(5, 48).bfloat16())
    assert before() is not None
    with torch.inference_mode():
        blocks(states)
    assert before() is None
