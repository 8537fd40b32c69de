"""A small network compares query and key.

    score = v . tanh(W q + b + U k)

Bahdanau et al. 2015, arXiv:1409.0473; with one split matrix it is Luong's "concat".
"""

import torch
from torch import Tensor, nn

from regard.core import Score


class Additive(Score):
    """hidden: channels of the network; None: those of a head. Shared by all heads."""

    examples = ({}, {"hidden": 5})

    def __init__(self, dim: int, heads: int, hidden: int | None = None):
        super().__init__()
        self.heads = heads
        self.of_query = nn.Linear(dim, hidden or dim)
        self.of_key = nn.Linear(dim, hidden or dim, bias=False)
        self.v = nn.Linear(hidden or dim, 1, bias=False)

    def query(self, q: Tensor) -> Tensor:
        return self.of_query(q)

    def key(self, k: Tensor) -> Tensor:
        return self.of_key(k)

    def forward(self, q: Tensor, k: Tensor, key_at: Tensor) -> Tensor:
        return self.v(torch.tanh(q[..., :, None, :] + k[..., None, :, :])).squeeze(-1)

    def flops(self, queries: int, keys: int, looks: float) -> int:
        maps = self.of_query.weight.numel() + self.of_key.weight.numel()  # new keys are as many as new queries
        pair = self.v.in_features - self.of_query.in_features  # instead of a dot product over the head's channels
        return 2 * self.heads * (queries * maps + round(looks * pair))
