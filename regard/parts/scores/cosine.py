"""Addressing by content: how alike query and key are in direction, whatever their lengths, sharpened by a strength.

    score = b  q . k / (|q| |k|)

Graves et al. 2014, "Neural Turing Machines", arXiv:1410.5401. Learned in each head: Henry et al. 2020, "Query-Key
Normalization", arXiv:2010.04245.
"""

import math

import torch
from torch import Tensor, nn

from regard.core import Score, UserError


class Cosine(Score):
    """strength: a fixed b; None: learned in each head, from sqrt(dim) on, where random queries and keys score as they
    do under the scaled dot product.
    """

    examples = ({}, {"strength": 7.0})

    def __init__(self, dim: int, heads: int, strength: float | None = None):
        super().__init__()
        if strength is not None and strength <= 0:
            raise UserError(f"strength must be above 0, not {strength}")
        self.fixed = strength
        self.log_strength = None if strength else nn.Parameter(torch.full((heads, 1, 1), math.log(dim) / 2))

    def query(self, q: Tensor) -> Tensor:
        return unit(q) * (self.fixed if self.log_strength is None else self.log_strength.exp())

    def key(self, k: Tensor) -> Tensor:
        return unit(k)


def unit(x: Tensor) -> Tensor:
    """x (..., dim) in length 1; next to nothing stays so, and its gradient finite."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).eps)
