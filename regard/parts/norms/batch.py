"""Batch normalization: each channel is centered and scaled to unit variance over the valid positions of the batch.

    y = gain * (x - mean) / sqrt(var + eps) + shift

In eval mode the running mean and variance are used, so a position does not depend on others; in training it does,
future positions included. Ioffe & Szegedy 2015, arXiv:1502.03167.
"""

import torch
from torch import Tensor, nn

from regard.core import Norm
from regard.core.contracts import count_valid, zero_padding


class Batch(Norm):
    """momentum: weight of the current batch in the running statistics."""

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
        """Return the mean and variance (width,) of this batch, and update the running ones."""
        n = count_valid(x, valid)
        mean = zero_padding(x, valid).flatten(0, -2).sum(0) / n
        var = zero_padding(x - mean, valid).square().flatten(0, -2).sum(0) / n
        with torch.no_grad():
            self.mean.lerp_(mean.to(self.mean.dtype), self.momentum)
            self.var.lerp_((var * n / (n - 1).clamp(min=1)).to(self.var.dtype), self.momentum)  # unbiased
        return mean, var
