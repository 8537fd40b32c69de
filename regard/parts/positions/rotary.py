"""Rotary positions: each pair of channels of a query and a key is turned by an angle that grows with the place, so
that their dot product knows only how far apart they are.

Su et al. 2021, "RoFormer", arXiv:2104.09864.
"""

import torch
from torch import Tensor

from regard.core import Position


class Rotary(Position):
    """To be completed."""

    relative = True

    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        self.register_buffer("rates", base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim), persistent=False)

    def _turn(self, x: Tensor, at: Tensor) -> Tensor:
        angles = (at[:, None, :, None] * self.rates).to(x.dtype)
        one, two = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._turn(q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._turn(k, at)
