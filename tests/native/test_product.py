"""Linear maps of a few rows: the same as torch's, whoever reads which weights."""

import pytest
import torch
import torch.nn.functional as F

import regard
from regard.core import product
from regard.core.product import Linear, is_plain_linear, linear, own_maps
from regard.native import build
from regard.verify import laws


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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
    monkeypatch.setattr(product, "apply", lambda *given, real=product.apply: ran.append(1) or real(*given))
    for rows in (2, product.FEW, product.FEW + 1):
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


@pytest.mark.parametrize("name", ["transformer", "llama", "seq2seq-luong"])
@pytest.mark.parametrize("threads", [2], indirect=True)
def test_laws_hold_with_it(name, threads):
    torch.manual_seed(0)
    model = regard.build(name, size="tiny", vocab=61)
    own_maps(model)
    assert any(isinstance(module, Linear) for module in model.modules())
    for finding in laws.check(model, without=["edited", "branches"]):  # tests/laws has them, for all recipes
        assert finding.holds, f"{finding.law}: {finding.worst:.2e}"


def test_nothing_else_changes():
    model = regard.build("gpt2", size="tiny", vocab=61)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    own_maps(model)
    own_maps(model)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert all(is_plain_linear(module) for module in model.modules() if isinstance(module, torch.nn.Linear))
