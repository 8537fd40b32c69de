"""Layer normalisation: each vector is centred and brought to unit variance, then scaled and shifted per channel.

Ba et al. 2016, arXiv:1607.06450.
"""

import torch
from torch import Tensor, nn

from regard.core import Norm
from regard.native.decode import norm_params
from regard.native.structs import NormParams


class Layer(Norm):
    """bias: the shift."""

    examples = ({}, {"bias": False})

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True):
        super().__init__()
        self.inner = nn.LayerNorm(width, eps, bias=bias)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        inner = self.inner
        weight, bias = inner._parameters["weight"], inner._parameters["bias"]  # which is faster to ask for
        return torch.layer_norm(x, inner.normalized_shape, weight, bias, inner.eps)

    def norm_params(self, x: Tensor) -> NormParams | None:
        inner: nn.LayerNorm = self._modules["inner"]  # type: ignore[assignment]
        return norm_params(x, inner._parameters["weight"], inner._parameters["bias"], inner.eps, True)
