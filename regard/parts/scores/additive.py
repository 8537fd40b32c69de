"""Additive attention: a small network scores each pair of query and key.

    score = v . tanh(W q + b + U k)

Bahdanau et al. 2015, arXiv:1409.0473; with one split matrix it is Luong's "concat".
"""

import torch
from torch import Tensor, nn

from regard.core import Score


class Additive(Score):
    """hidden:  channels of the network, which all heads share; None: those of a head.
    key_dim:    channels of a key; None: those of a query.
    """

    examples = ({}, {"hidden": 5})

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None = None, hidden: int | None = None, key_dim: int | None = None
    ):
        super().__init__()
        self.heads, self.kv_heads, self.key_dim = heads, kv_heads or heads, key_dim or dim
        self.cached = hidden or dim
        self.of_query = nn.Linear(dim, self.cached)
        self.of_key = nn.Linear(self.key_dim, self.cached, bias=False)
        self.v = nn.Linear(self.cached, 1, bias=False)

    def query(self, q: Tensor) -> Tensor:
        return self.of_query(q)

    def key(self, k: Tensor) -> Tensor:
        return self.of_key(k)

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        return self.v(torch.tanh(q[..., :, None, :] + k[..., None, :, :])).squeeze(-1)

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        maps = self.heads * queries * self.of_query.weight.numel() + self.kv_heads * keys * self.of_key.weight.numel()
        extra = self.v.in_features - self.of_query.in_features  # compared to a dot product over the head's channels
        return 2 * (maps + round(self.heads * pairs * extra))
