"""The dot product divided by the square root of the head dimension.

    score = q . k / sqrt(dim)

Vaswani et al. 2017, arXiv:1706.03762.
"""

from torch import Tensor

from regard.core import Score


class ScaledDot(Score):
    """scale: factor on the dot product; None: 1/sqrt(dim)."""

    examples = ({}, {"scale": 0.3})

    def __init__(self, dim: int, scale: float | None = None):
        super().__init__()
        self.scale = self.factor = dim**-0.5 if scale is None else scale

    def query(self, q: Tensor) -> Tensor:
        return q * self.scale
