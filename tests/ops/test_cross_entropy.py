"""The fused loss against the plain one: values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from regard.native import build
from regard.ops import cross_entropy as fused
from regard.ops import dispatch


@pytest.mark.pairwise
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [3, 5, 512])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_equals_plain(smoothing, with_bias, rows, own, turned, monkeypatch):
    """In parts and at once, by whoever multiplies, however it all lies."""
    monkeypatch.setattr(fused, "MAX_ROWS", rows)
    monkeypatch.setattr(fused, "TILE", 1)
    monkeypatch.setattr(dispatch, "LEAST_WORK", 1)
    if (known := build.load_kernels()) is not None:
        monkeypatch.setattr(known, "multiplies", own)
    torch.manual_seed(0)
    x, table = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    if turned:
        x, table = x.permute(2, 0, 1).contiguous().permute(1, 2, 0), table.T.contiguous().T
    x.requires_grad_()
    table.requires_grad_()
    bias = torch.randn(11, dtype=torch.float64, requires_grad=True) if with_bias else None
    target = torch.randint(11, (2, 7))
    if not turned:  # those that count are copied
        target[0, 3:] = -100
    wanted = [t for t in (x, table, bias) if t is not None]

    scores = F.linear(x, table, bias).flatten(0, 1)
    plain = F.cross_entropy(scores, target.flatten(), label_smoothing=smoothing, reduction="sum")
    nll = F.cross_entropy(scores, target.flatten(), reduction="sum")
    expected = torch.autograd.grad(3 * plain, wanted)

    loss, bare = fused.cross_entropy(x, table, bias, target, smoothing)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(bare, nll.detach())
    for again in (True, False):  # the second time, too
        for ours, theirs in zip(torch.autograd.grad(3 * loss, wanted, retain_graph=again), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_nothing_asked():
    """A batch in which no token counts has no loss and no gradient, and no NaN."""
    x = torch.randn(4, 5, requires_grad=True)
    loss, _ = fused.cross_entropy(x, torch.randn(11, 5), None, torch.full((4,), -100))
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(x.grad, torch.zeros(4, 5))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [5, 512])
def test_log_partition_equals_plain(with_bias, rows, monkeypatch):
    """Values and gradients, in chunks and at once, in both number formats."""
    monkeypatch.setattr(fused, "MAX_ROWS", rows)
    for dtype in (torch.float64, torch.float32):
        x, table = torch.randn(2, 7, 5, dtype=dtype, requires_grad=True), torch.randn(11, 5, dtype=dtype)
        table.requires_grad_()
        bias = torch.randn(11, dtype=dtype, requires_grad=True) if with_bias else None
        wanted, weights = [t for t in (x, table, bias) if t is not None], torch.randn(2, 7, dtype=dtype)
        plain, found = F.linear(x, table, bias).logsumexp(-1), fused.log_partition(x, table, bias)
        torch.testing.assert_close(found, plain)
        expected = torch.autograd.grad((weights * plain).sum(), wanted)
        for ours, theirs in zip(torch.autograd.grad((weights * found).sum(), wanted), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
