"""Axial positions: the sequence is laid out in rows and columns, and a position is the concatenation of a row vector
and a column vector. Half a million positions need only some hundred vectors per axis.

    p(n) = [R[n // columns]; C[n % columns]]

Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451, section 5, after Ho et al. 2019, "Axial
Attention in Multidimensional Transformers", arXiv:1912.12180.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError


class Axial(Position):
    """shape: numbers of rows and columns; a sequence longer than their product is refused.
    dims:     channels of a row vector and of a column vector, which sum to the width; None: half each.
    """

    adds_vectors = True
    examples = ({"shape": [5, 6]}, {"shape": [4, 8], "dims": [7, 17]})

    def __init__(self, width: int, shape: list, dims: list | None = None):
        super().__init__()
        dims = [width // 2, width - width // 2] if dims is None else dims
        if len(shape) != 2 or any(not isinstance(n, int) or n < 1 for n in shape):
            raise UserError(f"shape must be two numbers, rows and columns, not {shape}")
        if len(dims) != 2 or any(not isinstance(n, int) or n < 1 for n in dims) or sum(dims) != width:
            raise UserError(f"dims must be two numbers that sum to the width, {width}, not {dims}")
        self.limit = shape[0] * shape[1]
        self.rows, self.columns = (
            nn.Parameter(torch.empty(count, dim).normal_(std=0.02)) for count, dim in zip(shape, dims, strict=True)
        )

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        at = at.clamp(max=self.limit - 1)  # the model refuses longer sequences, but padding may lie beyond the limit
        columns = len(self.columns)
        place = F.embedding(at // columns, self.rows), F.embedding(at % columns, self.columns)
        return x + torch.cat(place, -1)
