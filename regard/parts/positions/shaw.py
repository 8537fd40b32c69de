"""Relative position representations: a learned vector for the distance between query and key is added to the key and to
the value. Distances are clipped.

    score = q . (k + a_(j-i))            o = sum of  weight (v + b_(j-i))            j - i clipped to -c ... c

Shaw et al. 2018, arXiv:1803.02155.
"""

import torch
from torch import Tensor, nn

from regard.core import Position, UserError


class Shaw(Position):
    """The tables are shared by all heads.

    clip:   largest distance with a vector of its own.
    shared: keys and values share one table (OpenNMT); otherwise each has its own (the paper, tensor2tensor).
    """

    relative = True
    needs_query = True
    examples = ({"clip": 4}, {"clip": 30, "shared": True})

    def __init__(self, dim: int, heads: int, clip: int = 16, shared: bool = False):
        super().__init__()
        if clip < 1:
            raise UserError(f"clip must be at least 1, not {clip}")
        self.clip, self.heads = clip, heads
        self.keys = nn.Parameter(torch.empty(2 * clip + 1, dim))
        self.values = self.keys if shared else nn.Parameter(torch.empty(2 * clip + 1, dim))
        for table in (self.keys, self.values):
            nn.init.xavier_uniform_(table)

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        scores = q @ self.keys.mT  # (batch, heads, n, 2 clip + 1): once per distance, not per key
        rows = self._rows(query_at, key_at)
        return torch.gather(scores, -1, rows.expand(*scores.shape[:-1], -1))

    def output_bias(self, weights: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
        by_distance = weights.new_zeros(*weights.shape[:-1], len(self.values))
        rows = self._rows(query_at, key_at)
        return by_distance.scatter_add(-1, rows.expand_as(weights), weights) @ self.values

    def _rows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return (key_at - query_at).clamp(-self.clip, self.clip) + self.clip  # (batch or 1, 1, n, m)

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        return 2 * self.heads * queries * (self.keys.numel() + self.values.numel())
