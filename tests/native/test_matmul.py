"""Products of many rows: the same as torch's, whatever lies how."""

import pytest
import torch

from regard.native import matmul as products
from regard.native.decode import ACTIVATIONS
from regard.native.matmul import multiply, pack_matrix
from regard.ops.activation import activation

CLOSE = {torch.float32: 2e-5, torch.float64: 1e-12}
SIZES = [(1, 1, 1), (7, 19, 33), (125, 40, 500), (250, 9, 1000)]  # rows, wide, deep


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=0, atol=CLOSE[found.dtype] * max(1.0, float(wanted.abs().max())))


def drawn(*size, turned=False, dtype=torch.float32):
    return torch.randn(*size[::-1], dtype=dtype).T if turned else torch.randn(*size, dtype=dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(("rows", "wide", "deep"), SIZES)
@pytest.mark.parametrize("turned", [(False, True), (True, False)])
def test_as_torch_has_it(threads, known, dtype, rows, wide, deep, turned):
    x, p = drawn(rows, deep, turned=turned[0], dtype=dtype), drawn(deep, wide, turned=turned[1], dtype=dtype)
    bias, there = torch.randn(wide, dtype=dtype), torch.randn(rows, wide, dtype=dtype)
    near(multiply(known, x, p), x @ p)
    near(multiply(known, x, p, bias), x @ p + bias)
    near(multiply(known, x, p, to=there.clone(), adds=True), there + x @ p)
    laid = pack_matrix(known, p)
    near(multiply(known, x, laid), x @ p)
    near(multiply(known, 2 * x, laid), 2 * x @ p)  # which is as it was


def test_into_a_part_of_something(known):
    """Rows of the result that lie apart, and rows of x that lie neither way side by side."""
    x, p, whole = torch.randn(40, 30, 2)[..., 0], torch.randn(30, 21), torch.zeros(40, 50)
    multiply(known, x, p, to=whole[:, 5:26])
    near(whole[:, 5:26], x @ p)
    assert not whole[:, :5].any()
    assert not whole[:, 26:].any()


def test_of_nothing(known):
    bias = torch.randn(4)
    assert not multiply(known, torch.randn(3, 0), torch.randn(0, 4)).any()
    assert torch.equal(multiply(known, torch.randn(3, 0), torch.randn(0, 4), bias), bias.expand(3, 4))
    assert multiply(known, torch.randn(0, 5), torch.randn(5, 4)).shape == (0, 4)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("activation_name", ACTIVATIONS)
def test_bends_after_it(threads, known, dtype, activation_name):
    x, p = drawn(70, 400, dtype=dtype) / 5, drawn(400, 37, dtype=dtype) / 5
    activated = torch.empty(70, 37, dtype=dtype)
    hidden = multiply(known, x, p, activation=activation_name, activated=activated)
    near(hidden, x @ p)
    of = activation(activation_name)
    near(activated, of(hidden))
    again, up, back = torch.empty_like(activated), drawn(70, 11, dtype=dtype), drawn(11, 37, dtype=dtype)
    asked = hidden.clone().requires_grad_()
    of(asked).backward(up @ back)
    near(multiply(known, up, back, activation=activation_name, activated=again, hidden=hidden), asked.grad)
    near(again, of(hidden))


def test_what_is_not_a_number_stays_where_it_is(known):
    x, p = torch.randn(13, 20), torch.randn(20, 18)
    x[3, 4], p[5, 7] = torch.inf, torch.nan
    found, wanted = multiply(known, x, p), x @ p
    assert torch.equal(found.isfinite(), wanted.isfinite())


def test_room_is_kept_and_grows(known, monkeypatch):
    monkeypatch.setattr(products, "MAX_KEPT", 4 * 30 * 40)
    for deep, wide in ((3, 5), (30, 40), (10, 9), (60, 80)):
        x, p = torch.randn(50, deep), torch.randn(deep, wide)
        near(multiply(known, x, p), x @ p)
