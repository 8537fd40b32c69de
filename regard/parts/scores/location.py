"""Location-based attention: the score depends on the query and the position of the key, not on its content.

    score(q, j) = (W q)_j            one row of W for each position j

Luong et al. 2015, arXiv:1508.04025, "location".
"""

import torch
from torch import Tensor, nn

from regard.core import Score, UserError


class Location(Score):
    """length: maximum number of positions; a key beyond them is refused. The projection W is shared by all heads."""

    examples = ({"length": 29},)

    def __init__(self, dim: int, heads: int, length: int):
        super().__init__()
        if length < 1:
            raise UserError(f"length must be at least 1, not {length}")
        self.dim, self.heads, self.length = dim, heads, length
        self.of_query = nn.Linear(dim, length, bias=False)

    def query(self, q: Tensor) -> Tensor:
        return self.of_query(q)

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        last = int(key_at.max())
        if last >= self.length:
            raise UserError(
                f"score 'location' has {self.length} positions, and there is a key at position {last}: raise its length"
            )
        at = key_at.clamp(min=0)[:, None, None, :]
        return torch.gather(q, -1, at.expand(*q.shape[:-1], -1))

    def flops(self, queries: int, keys: int, pairs: float) -> int:
        return 2 * self.heads * (queries * self.of_query.weight.numel() - round(pairs * self.dim))  # no dot product
