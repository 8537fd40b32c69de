"""Rotary positions whose sines and cosines are a table that is stored with the weights, as in RoFormer checkpoints.

    (q_2i, q_2i+1) at position n  ->  rotated by the angle with sine T[n, i] and cosine T[n, dim/2 + i]

Su et al. 2021, "RoFormer", arXiv:2104.09864.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Position, UserError
from regard.ops.rotary import angles, frequencies, rotate


class RotaryTable(Position):
    """length: maximum number of positions; a longer sequence is refused.
    base:      base of the geometric series of frequencies that initializes the table.
    values:    values are rotated too.
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
        return self._rotate(q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._rotate(k, at)

    def value(self, v: Tensor, at: Tensor) -> Tensor:
        return self._rotate(v, at) if self.values else v

    def _rotate(self, x: Tensor, at: Tensor) -> Tensor:
        at = at.clamp(max=self.limit - 1)  # type: ignore[type-var]  # only padding lies beyond the limit
        sin, cos = F.embedding(at, self.table)[:, None].to(x.dtype).chunk(2, -1)  # (batch or 1, 1, time, dim/2)
        return rotate(x, cos, sin, "interleaved")
