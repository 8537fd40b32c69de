"""Learned positions: a learned vector for each position, added to the token vectors. The length is limited.

    p(n) = P[n]

Gehring et al. 2017, arXiv:1705.03122; BERT, GPT-2 and BART use it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError


class Learned(Position):
    """length: maximum number of positions; a longer sequence is refused.
    offset:    rows of the table before that of position 0; BART and OPT have 2.
    """

    adds_vectors = True
    examples = ({"length": 29}, {"length": 31, "offset": 2})

    def __init__(self, width: int, length: int, offset: int = 0):
        super().__init__()
        if length < 1 or offset < 0:
            raise UserError(f"learned positions need length >= 1 and offset >= 0, not {length} and {offset}")
        self.limit, self.offset = length, offset
        self.table = nn.Parameter(torch.empty(length + offset, width).normal_(std=0.02))

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        at = at.clamp(max=self.limit - 1)  # the model refuses longer sequences, but padding may lie beyond the limit
        return x + F.embedding(at + self.offset, self.table)
