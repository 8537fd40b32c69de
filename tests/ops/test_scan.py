"""The blocked scan against one position after the other, gradients too."""

import pytest
import torch

from regard.bases.shift import shifted
from regard.core import Context
from regard.ops.scan import max_scan, scan


def inputs(time):
    torch.manual_seed(time)
    gate = torch.rand(2, time, 1, 3, dtype=torch.float64).requires_grad_()
    x, first = (torch.randn(2, *shape, 2, 3, dtype=torch.float64).requires_grad_() for shape in ((time,), ()))
    return gate, x, first


@pytest.mark.parametrize("time", [1, 2, 3, 13, 16, 17, 101])
def test_scan(time):
    gate, x, first = leaves = inputs(time)
    h, want = first, []
    for t in range(time):
        h = gate[:, t] * h + x[:, t]
        want.append(h)
    want = torch.stack(want, 1)
    y = scan(gate, x, first)
    assert torch.allclose(y, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(y)
    wanted, given = (torch.autograd.grad((t * weight).sum(), leaves) for t in (want, y))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(given, wanted, strict=True))


@pytest.mark.parametrize("time", [1, 2, 13, 16, 17])
def test_peaks(time):
    torch.manual_seed(time)
    x, fall = 9 * torch.randn(2, time, 3), -torch.rand(1, time, 3)
    top, want = torch.full((2, 3), float("-inf")), []
    for t in range(time):
        top = torch.maximum(top + fall[:, t], x[:, t])
        want.append(top)
    found = max_scan(fall, x, torch.full((2, 3), float("-inf")))
    assert torch.allclose(found, torch.stack(want, 1), rtol=0, atol=1e-5)


def test_after():
    first, x = torch.zeros(3, 2), torch.randn(3, 4, 2)
    lengths = torch.tensor([4, 0, 2])
    before, last = shifted(first, x, Context.begin(3, 4, valid=torch.arange(4)[None] < lengths[:, None]))
    assert torch.equal(before[:, 1:], x[:, :-1])
    assert torch.equal(before[:, 0], first)
    assert torch.equal(last, torch.stack((x[0, 3], first[1], x[2, 1])))
