"""Layer normalization: each vector is centered and scaled to unit variance, then multiplied by a gain per channel.

Ba et al. 2016, arXiv:1607.06450.
"""

from torch import Tensor, nn

from regard.core import Norm
from regard.core.fusion import FusedNorm


class Layer(Norm):
    """bias: there is also a learned bias per channel."""

    examples = ({}, {"bias": False})

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.inner = nn.LayerNorm(width, eps, bias=bias)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.inner(x)

    def fused(self) -> FusedNorm:
        inner = self.inner
        return FusedNorm(inner._parameters["weight"], inner._parameters["bias"], inner.eps, centered=True)
