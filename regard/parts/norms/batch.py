"""Batch normalisation: each channel is centred and brought to unit variance over the real positions of the batch.

    y = gain * (x - mean) / sqrt(var + eps) + shift

In eval mode mean and variance are those gathered in training, so that a position does not look at the others; in
training it does, the future included. Ioffe & Szegedy 2015, arXiv:1502.03167.
"""

import torch
from torch import Tensor, nn

from regard.core import Norm
from regard.core.norm import count_valid, zero_padding


class Batch(Norm):
    """momentum: how much of the running statistics each batch replaces."""

    examples = ({}, {"momentum": 0.3, "eps": 1e-3})

    def __init__(self, width: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        mean, var = self.statistics(x, valid) if self.training else (self.mean, self.var)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias

    def statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """Mean and variance (width,) of this batch; the running ones move towards them."""
        n = count_valid(x, valid)
        mean = zero_padding(x, valid).flatten(0, -2).sum(0) / n
        var = zero_padding(x - mean, valid).square().flatten(0, -2).sum(0) / n
        with torch.no_grad():
            self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
            self.var.lerp_((var * n / (n - 1).clamp(min=1)).to(self.var.dtype), self.momentum)  # without bias
        return mean, var
