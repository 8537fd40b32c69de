"""Involution: position by position, in one and two dimensions, and as a convolution where all kernels are equal."""

import pytest
import torch
import torch.nn.functional as F

from regard.core import Context, Mixer, UserError, part
from regard.parts.mixers.involution import Involution
from regard.verify.laws import max_difference


def make(**given) -> Involution:
    torch.manual_seed(0)
    return Involution(12, group=4, **given).double().eval()


@torch.no_grad()
@pytest.mark.parametrize(("size", "causal"), [(4, True), (4, False), (5, False), (1, True)])
def test_a_line(size, causal):
    mixer, x = make(size=size, causal=causal), torch.randn(2, 9, 12, dtype=torch.float64)
    kernels, want = mixer.kernels(x), torch.zeros_like(x)
    before = size - 1 if causal else (size - 1) // 2
    for t in range(9):
        for tap in range(size):
            if 0 <= t + tap - before < 9:
                want[:, t] += kernels[:, t, :, tap].repeat_interleave(4, 1) * x[:, t + tap - before]
    assert max_difference(mixer(x, Context.begin(2, 9)), want) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("time", [20, 13])  # whole rows, and a last one that ends early
def test_an_image(time):
    mixer, x = make(size=3, causal=False, columns=5, norm="batch"), torch.randn(2, time, 12, dtype=torch.float64)
    kernels, want = mixer.kernels(x), torch.zeros_like(x)
    for t in range(time):
        for tap in range(9):
            row, column = t // 5 + tap // 3 - 1, t % 5 + tap % 3 - 1
            if row >= 0 and 0 <= column < 5 and row * 5 + column < time:
                want[:, t] += kernels[:, t, :, tap].repeat_interleave(4, 1) * x[:, row * 5 + column]
    assert max_difference(mixer(x, Context.begin(2, time)), want) < 1e-12


@torch.no_grad()
def test_the_same_kernel_everywhere_is_a_convolution():
    mixer, x = make(size=4), torch.randn(2, 9, 12, dtype=torch.float64)
    mixer.span.weight.zero_()
    kernel = mixer.span.bias.view(3, 1, 4).repeat_interleave(4, 0)
    want = F.conv1d(F.pad(x.mT, (3, 0)), kernel, groups=12).mT
    assert max_difference(mixer(x, Context.begin(2, 9)), want) < 1e-12


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"group": 7}, "group divide the width of 24"),
        ({"group": 8, "size": 0}, "must be at least 1"),
        ({"group": 8, "columns": 5}, "set causal = false, and an odd size"),
        ({"group": 8, "columns": 5, "causal": False, "size": 4}, "an odd size"),
    ],
)
def test_bad_arguments(given, sentence):
    with pytest.raises(UserError, match=sentence):
        part(Mixer, {"part": "involution", **given}, width=24, heads=3)


def test_to_both_sides_does_not_step():
    mixer, context = make(size=3, causal=False), Context.begin(2, 3)
    with pytest.raises(UserError, match="does not step"):
        mixer.step(torch.zeros(2, 3, 12).double(), mixer.start(context, 3), context)
