"""Cosine attention: the cosine similarity of query and key, times a strength.

    score = b  q . k / (|q| |k|)

Graves et al. 2014, "Neural Turing Machines", arXiv:1410.5401. With a learned strength: Henry et al. 2020, "Query-Key
Normalization", arXiv:2010.04245.
"""

import math

import torch
from torch import Tensor, nn

from regard.core import Score, UserError


class Cosine(Score):
    """strength: a constant b; None: b is learned per head, initialized to sqrt(dim), where random queries and keys
    score as under the scaled dot product.
    """

    examples = ({}, {"strength": 7.0})

    def __init__(self, dim: int, heads: int, strength: float | None = None):
        super().__init__()
        if strength is not None and strength <= 0:
            raise UserError(f"strength must be above 0, not {strength}")
        self.fixed = strength
        self.log_strength = None if strength else nn.Parameter(torch.full((heads, 1, 1), math.log(dim) / 2))

    def query(self, q: Tensor) -> Tensor:
        return normalize(q) * (self.fixed if self.log_strength is None else self.log_strength.exp())

    def key(self, k: Tensor) -> Tensor:
        return normalize(k)


def normalize(x: Tensor) -> Tensor:
    """Normalize x (..., dim) to length 1. Vectors near zero stay near zero, with a finite gradient."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).eps)
