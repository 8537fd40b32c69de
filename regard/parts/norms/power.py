"""Power normalization: each channel is divided by a running quadratic mean, which is more stable than the statistics of
a batch of text.

    forward    z = x / psi            y = gain * z + shift            psi^2 <- a psi^2 + (1 - a) mean(x^2)
    backward   g = dy * gain - nu z   dx = g / psi                    nu <- nu + (1 - b) mean(g z)

psi and nu are running values from earlier steps. Since the running mean is not a function of this batch, the backward
pass is an approximation: nu keeps the gradient from growing along z. Before this, each vector is divided by its own
root mean square. In the first steps psi is that of the batch itself. Shen et al. 2020, arXiv:2003.07845.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.core import Norm, UserError
from regard.core.contracts import count_valid, zero_padding

RMS_EPS = 1e-5


class Power(Norm):
    """forward_decay, backward_decay: a and b above.
    warmup:   number of steps that use the quadratic mean of the batch.
    groups:   number of channel groups, each first divided by its own root mean square.
    gradient: "paper": as above, over valid positions; "authors": as in their code, where dx is divided by the quadratic
              mean of the batch even after the warm-up, and padding counts in nu.
    """

    examples = ({"warmup": 2}, {"warmup": 0, "groups": 3, "forward_decay": 0.7, "backward_decay": 0.6})

    def __init__(
        self,
        width: int,
        eps: float = 1e-5,
        forward_decay: float = 0.9,
        backward_decay: float = 0.9,
        warmup: int = 10000,
        groups: int = 1,
        gradient: str = "paper",
    ):
        super().__init__()
        if groups < 1 or width % groups:
            raise UserError(f"width {width} is not divisible into {groups} groups: change one of them")
        if gradient not in ("paper", "authors"):
            raise UserError(f"gradient must be 'paper' or 'authors', not '{gradient}'")
        self.eps, self.warmup, self.groups, self.gradient = eps, warmup, groups, gradient
        self.forward_decay, self.backward_decay = forward_decay, backward_decay
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("square", torch.ones(width))  # psi^2
        self.register_buffer("along", torch.zeros(width))  # nu / (1 - b)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        grouped = x.unflatten(-1, (self.groups, -1))
        x = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + RMS_EPS)).flatten(-2)
        if not self.training:
            return x * torch.rsqrt(self.square + self.eps) * self.weight + self.bias
        own, used = self.advance(x.detach(), valid)
        back = own if self.gradient == "authors" else used
        counted = valid if self.gradient == "paper" else None
        z = Divide.apply(
            x, (used + self.eps).sqrt(), (back + self.eps).sqrt(), self.along, self.backward_decay, counted
        )
        return z * self.weight + self.bias

    @torch.no_grad()
    def advance(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the quadratic mean of the batch and the one to divide by, (width,) each, and update the running
        one."""
        own = (zero_padding(x, valid).square().flatten(0, -2).sum(0) / count_valid(x, valid)).to(self.square.dtype)
        self.steps += 1
        used = torch.where(self.steps <= self.warmup, own, self.square)
        mean = self.square + (own - self.square) / self.steps  # of all batches so far
        self.square.copy_(torch.where(self.steps < self.warmup, mean, self.square)).lerp_(own, 1 - self.forward_decay)
        return own, used


class Divide(torch.autograd.Function):
    """Compute z = x / psi, with the backward pass above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, psi: Tensor, back: Tensor, along: Tensor, decay: float, valid: Tensor | None
    ) -> Tensor:
        z = x / psi
        ctx.save_for_backward(z, back, valid)
        ctx.along, ctx.decay = along, decay  # not saved: the backward pass reads and updates the current value
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, back, valid = ctx.saved_tensors
        g = zero_padding(grad - (1 - ctx.decay) * ctx.along * z, valid)
        ctx.along += (zero_padding(g * z, valid).flatten(0, -2).sum(0) / count_valid(z, valid)).to(ctx.along.dtype)
        return g / back, None, None, None, None, None
