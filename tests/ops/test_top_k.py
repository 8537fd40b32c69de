"""The few largest, as torch finds them."""

import pytest
import torch

from regard.ops.top_k import COLUMNS, MIN_LENGTH, top_k


@pytest.mark.parametrize("n", [7, MIN_LENGTH - 1, MIN_LENGTH, 10_000, 10_007, 50 * COLUMNS, 50 * COLUMNS + 1])
@pytest.mark.parametrize("many", [1, 5, 20])
def test_as_torch(n, many):
    many = min(many, n)
    for scores in (torch.randn(6, n), torch.randn(6, n).sort(-1).values, -torch.randn(6, n).sort(-1).values):
        found, at = top_k(scores, many)
        wanted = scores.topk(many, -1)
        assert torch.equal(found, wanted.values)
        assert torch.equal(at, wanted.indices)


def test_few_that_count_and_many_alike():
    scores = torch.full((2, 10_000), -torch.inf)
    scores[0, 9_999], scores[0, 17], scores[1, 300] = 1.0, 2.0, 3.0
    found, at = top_k(scores, 3)
    assert found.tolist() == [[2.0, 1.0, -torch.inf], [3.0, -torch.inf, -torch.inf]]
    assert at[0, :2].tolist() == [17, 9_999]
    assert len(set(at[1].tolist())) == 3
    found, at = top_k(torch.zeros(1, 10_000), 10)
    assert found.eq(0).all()
    assert at.unique().numel() == 10


def test_what_is_not_a_number_is_found():
    scores = torch.randn(1, 10_000)
    scores[0, 4321] = torch.nan
    assert top_k(scores, 2)[0].isnan().any()
