"""Gradients in memory of their own: the same as torch's, step after step."""

import pytest
import torch

from regard.core import Context
from regard.core.contracts import look_up
from regard.native import build
from regard.ops import accumulate, dispatch
from regard.ops import cross_entropy as kernel
from regard.ops.cross_entropy import cross_entropy
from regard.parts.feedforwards.mlp import Mlp
from regard.train.gradients import Gradients


def weights():
    torch.manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(3, 4)),
        torch.nn.Parameter(torch.randn(4)),
        torch.nn.Parameter(torch.ones(2)),
    ]


def loss(parts, step):
    """The second is used in the second step alone, the last one never."""
    one, two, _ = parts
    return one.square().sum() * (step + 1) + (two.sum() * one[0].sum() if step == 1 else 0)


def test_as_torch_has_them():
    ours, theirs = weights(), weights()
    gradients = Gradients(ours)
    buffers = [buffer.data_ptr() for buffer in gradients.buffers]
    for step in range(3):
        gradients.zero()
        for parameter in theirs:
            parameter.grad = None
        for _ in range(2):  # two parts of a step
            loss(ours, step).backward()
            loss(theirs, step).backward()
        gradients.drop_unused()
        for mine, other, buffer in zip(ours, theirs, buffers, strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if other.grad is not None:
                assert torch.equal(mine.grad, other.grad)
                assert mine.grad.data_ptr() == buffer


def test_what_others_have_made_is_added():
    ours = weights()
    gradients = Gradients(ours)
    gradients.zero()
    loss(ours, 0).backward()
    before = ours[0].grad.clone()
    gradients.add(0, torch.ones(3, 4))
    gradients.add(2, torch.ones(2))
    gradients.drop_unused()
    assert torch.equal(ours[0].grad, before + 1)
    assert ours[1].grad is None
    assert ours[2].grad.tolist() == [1, 1]


class Small(torch.nn.Module):
    """A feed-forward and words, which are read and scored by the same table."""

    def __init__(self, bend: str):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(50, 12))
        self.mlp = Mlp(12, 24, activation=bend)

    def forward(self, tokens, targets, smoothing):
        x = look_up(self.table, tokens, "tokens")
        x = x + self.mlp(x, Context.begin(*tokens.shape, x.device))
        return cross_entropy(x, self.table, None, targets, smoothing)[0]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("bend", ["relu", "gelu"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_added_up_where_they_are_made(monkeypatch, own, bend, smoothing):
    known = build.load_kernels()
    if known is not None:
        monkeypatch.setattr(known, "multiplies", own)
        monkeypatch.setattr(dispatch, "LEAST_WORK", 1)
    monkeypatch.setattr(kernel, "MAX_ROWS", 16)
    ours, theirs = Small(bend), Small(bend)
    gradients = Gradients(list(ours.parameters()))
    for step in range(2):
        torch.manual_seed(step)
        parts = [(torch.randint(50, (3, 9)), torch.randint(50, (3, 9))) for _ in range(2)]
        gradients.zero()
        theirs.zero_grad()
        for tokens, targets in parts:
            with accumulate.accumulate_into(gradients, 1 / 7):
                (ours(tokens, targets, smoothing) / 7).backward()
            (theirs(tokens, targets, smoothing) / 7).backward()
        gradients.drop_unused()
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert accumulate.buffer_for(ours.table) == (1.0, None)
    tokens, targets = parts[0]
    mine, other = (torch.autograd.grad(m(tokens, targets, smoothing), [*m.parameters()]) for m in (ours, theirs))
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))  # given back, where nobody adds up


def test_rows_of_what_is_no_parameter():
    """Such as a table that is made of one: its gradient goes on to that."""
    table = torch.nn.Parameter(torch.randn(20, 3))
    gradients = Gradients([table])
    gradients.zero()
    numbers, weights = torch.tensor([[3, 7, 3]]), torch.randn(1, 3, 3)
    with accumulate.accumulate_into(gradients, 1.0):
        (look_up(2 * table, numbers, "tokens") * weights).sum().backward()
    wanted = torch.zeros(20, 3).index_add_(0, numbers[0], 2 * weights[0])
    torch.testing.assert_close(table.grad, wanted)


def test_a_loss_that_is_multiplied_by_more_is_not_learned_from():
    model = Small("relu")
    gradients = Gradients(list(model.parameters()))
    gradients.zero()
    tokens = torch.randint(50, (2, 5))
    with accumulate.accumulate_into(gradients, 0.5), pytest.raises(RuntimeError, match=r"by 0.5, but was by 1.0"):
        model(tokens, tokens, 0.0).backward()
