"""RMS normalization: each vector is divided by its root mean square, without centering it.

    y = gain * x / sqrt(mean(x^2) + eps)

Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from torch import Tensor, nn

from regard.core import Norm
from regard.core.fusion import FusedNorm


class Rms(Norm):
    """gain: there is a learned gain per channel."""

    examples = ({}, {"gain": False, "eps": 1e-3})

    def __init__(self, width: int, eps: float = 1e-6, gain: bool = True):
        super().__init__()
        self.inner = nn.RMSNorm(width, eps, elementwise_affine=gain)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.inner(x)

    def fused(self) -> FusedNorm:
        inner = self.inner
        return FusedNorm(inner._parameters["weight"], None, inner.eps, centered=False)
