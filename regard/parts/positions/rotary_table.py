"""Rotary positions whose sines and cosines stand in a table that is kept with the weights, as those of RoFormer do.

    (q_2i, q_2i+1) at place n  ->  turned by the angle with sine T[n, i] and cosine T[n, dim/2 + i]

Su et al. 2021, "RoFormer", arXiv:2104.09864.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Position, UserError
from regard.ops.rotary import angles, frequencies, rotate


class RotaryTable(Position):
    """length: places that it knows; a longer sequence is refused.
    base:      of the geometric series of speeds that the table begins with.
    values:    they are turned as well.
    """

    examples = ({"length": 29}, {"length": 31, "base": 500.0, "values": True})

    def __init__(self, dim: int, length: int, base: float = 10000.0, values: bool = False):
        super().__init__()
        if length < 1 or dim % 2:
            raise UserError(f"a table of rotary positions needs length >= 1 and an even dim, not {length} and {dim}")
        self.limit, self.values = length, values
        angle = angles(torch.arange(length), frequencies(dim, base))  # (length, dim/2)
        self.register_buffer("table", torch.cat((angle.sin(), angle.cos()), -1).float())

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._turn(q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._turn(k, at)

    def value(self, v: Tensor, at: Tensor) -> Tensor:
        return self._turn(v, at) if self.values else v

    def _turn(self, x: Tensor, at: Tensor) -> Tensor:
        known = at.clamp(max=self.limit - 1)  # type: ignore[type-var]  # beyond, only padding stands
        sin, cos = F.embedding(known, self.table)[:, None].to(x.dtype).chunk(2, -1)  # (batch or 1, 1, time, dim/2)
        return rotate(x, cos, sin, "interleaved")
