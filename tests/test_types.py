import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeflash.types import DraftHead, wide_top_k


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([64 * 64, 64 * 80, 64 * 64 + 1, 100]),
    k=st.sampled_from([1, 2, 7, 40, 100]),
    spread=st.sampled_from([1, 1000]),
)
def test_wide_top_k_is_top_k(seed, width, k, spread):
    """With many equal values too: which of them is taken is open, the values are not."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 50 * spread, (2, 3, width), generator=generator).float()
    best, index = wide_top_k(values, k)
    assert torch.equal(best, values.topk(k).values)
    assert torch.equal(values.gather(-1, index), best)
    assert all(len(set(row.tolist())) == k for row in index.flatten(0, 1))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_top_k_is_the_head_of_a_log_softmax(rows, temperature):
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    head = DraftHead(
        embed=lambda ids: weight[ids],
        norm=lambda hidden: hidden,
        project=lambda normed: normed @ weight.T,
        vocab_size=45,
        temperature=temperature,
    )
    normed = torch.randn(1, rows, 8, generator=torch.Generator().manual_seed(1))
    ids, log_probs = head.top_k(normed, 5)
    # What lies past the vocabulary is padding and has no probability.
    expected = ((normed @ weight.T)[..., :45] / temperature).log_softmax(-1)
    torch.testing.assert_close(log_probs, expected.topk(5).values)
    torch.testing.assert_close(expected.gather(-1, ids), log_probs)
    assert head.top_k(normed, 1000)[0].shape[-1] == 45
