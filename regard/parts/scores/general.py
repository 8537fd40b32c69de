"""Bilinear attention: a learned matrix between query and key.

    score = q . W k

Luong et al. 2015, arXiv:1508.04025. W k is computed once, before the key is cached, so that a step costs no more than
with the plain dot product.
"""

import torch
from torch import Tensor, nn

from regard.core import Score


class General(Score):
    """There is one matrix per key head.

    key_dim: channels of a key; None: those of a query.
    """

    examples = ({},)

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None, key_dim: int | None = None):
        super().__init__()
        self.key_dim = key_dim or dim
        bound = (6 / (dim + self.key_dim)) ** 0.5
        self.weight = nn.Parameter(torch.empty(kv_heads or heads, dim, self.key_dim).uniform_(-bound, bound))

    def key(self, k: Tensor) -> Tensor:
        return k @ self.weight.mT

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        return 2 * keys * self.weight.numel()
