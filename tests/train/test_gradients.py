"""Gradients in memory of their own: the same as torch's, step after step."""

import torch

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
    rooms = [room.data_ptr() for room in gradients.rooms]
    for step in range(3):
        gradients.begin()
        for parameter in theirs:
            parameter.grad = None
        for _ in range(2):  # two parts of a step
            loss(ours, step).backward()
            loss(theirs, step).backward()
        gradients.end()
        for mine, other, room in zip(ours, theirs, rooms, strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if other.grad is not None:
                assert torch.equal(mine.grad, other.grad)
                assert mine.grad.data_ptr() == room


def test_what_others_have_made_is_added():
    ours = weights()
    gradients = Gradients(ours)
    gradients.begin()
    loss(ours, 0).backward()
    before = ours[0].grad.clone()
    gradients.add(0, torch.ones(3, 4))
    gradients.add(2, torch.ones(2))
    gradients.end()
    assert torch.equal(ours[0].grad, before + 1)
    assert ours[1].grad is None
    assert ours[2].grad.tolist() == [1, 1]
