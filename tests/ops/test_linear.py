"""Linear maps of a few rows: the same as torch's, whoever reads which weights."""

import pytest
import torch
import torch.nn.functional as F

from regard.native import build
from regard.ops import dispatch
from regard.ops import linear as ops
from regard.ops.linear import linear, matmul


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.pairwise
@pytest.mark.parametrize("shape", [(1, 1), (2,), (3, 2), (4, 8), (5, 8), (0, 3)])
@pytest.mark.parametrize("out", [1, 2, 6, 7, 20])
@pytest.mark.parametrize("bias", [True, False])
def test_as_torch(threads, shape, out, bias):
    x = torch.randn(*shape, 5, dtype=torch.float64)
    weight, add = torch.randn(out, 5, dtype=torch.float64), torch.randn(out, dtype=torch.float64) if bias else None
    found = linear(x, weight, add)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, add), rtol=0, atol=1e-12)


@pytest.mark.skipif(build.load_kernels() is None, reason="there is no compiler")
def test_is_used(threads, monkeypatch):
    """For few rows alone."""
    ran = []
    monkeypatch.setattr(ops, "apply", lambda *given, real=ops.apply: ran.append(1) or real(*given))
    for rows in (2, dispatch.FEW_ROWS, dispatch.FEW_ROWS + 1):
        linear(torch.randn(rows, 5), torch.randn(8, 5))
    assert len(ran) == 2


def test_gradients(threads):
    x, weight = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(linear, (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_numbers_are_left_to_torch(dtype):
    x, weight = torch.randn(3, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_weights_that_lie_otherwise(threads):
    x, weight = torch.randn(3, 5), torch.randn(5, 4).t()
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))


@pytest.mark.skipif(build.load_kernels() is None, reason="there is no compiler")
def test_products_by_whoever_is_faster(monkeypatch):
    known = build.load_kernels()
    x, p, bias = torch.randn(200, 120), torch.randn(120, 100), torch.randn(100)
    for own in (True, False):
        monkeypatch.setattr(known, "multiplies", own)
        assert dispatch.is_product_faster(known, 200, p) == own
        torch.testing.assert_close(matmul(known, x, p, bias), x @ p + bias)
        torch.testing.assert_close(matmul(known, x, p), x @ p)
    monkeypatch.setattr(known, "multiplies", True)
    assert not dispatch.is_product_faster(known, 2, p)
    assert not dispatch.is_product_faster(known, 2000, torch.empty(300, 300))
