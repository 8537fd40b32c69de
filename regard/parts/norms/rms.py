"""Root-mean-square normalisation: each vector is brought to unit length per channel, without centring it.

    y = gain * x / sqrt(mean(x^2) + eps)

Zhang & Sennrich 2019, arXiv:1910.07467.
"""

from torch import Tensor, nn

from regard.core import Norm
from regard.native.decode import norm_params
from regard.native.structs import NormParams


class Rms(Norm):
    """gain: one learned factor per channel."""

    examples = ({}, {"gain": False, "eps": 1e-3})

    def __init__(self, width: int, eps: float = 1e-6, gain: bool = True):
        super().__init__()
        self.inner = nn.RMSNorm(width, eps, elementwise_affine=gain)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return self.inner(x)

    def norm_params(self, x: Tensor) -> NormParams | None:
        inner: nn.RMSNorm = self._modules["inner"]  # type: ignore[assignment]
        return norm_params(x, inner._parameters["weight"], None, inner.eps, False)
