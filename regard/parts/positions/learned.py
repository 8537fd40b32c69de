"""Learned positions: a vector for each place, added to the token vectors. There are only so many.

    p(n) = P[n]

Gehring et al. 2017, arXiv:1705.03122; BERT, GPT-2 and BART use it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError


class Learned(Position):
    """length: places that it knows; a longer sequence is refused.
    offset:    rows of the table before the first place's; BART and OPT keep 2.
    """

    examples = ({"length": 29}, {"length": 31, "offset": 2})

    def __init__(self, width: int, length: int, offset: int = 0):
        super().__init__()
        if length < 1 or offset < 0:
            raise UserError(f"learned positions need length >= 1 and offset >= 0, not {length} and {offset}")
        self.limit, self.offset = length, offset
        self.table = nn.Parameter(torch.empty(length + offset, width).normal_(std=0.02))

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        known = at.clamp(max=self.limit - 1)  # the model refuses real columns beyond; padding may stand there
        return x + F.embedding(known + self.offset, self.table)
