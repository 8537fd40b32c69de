"""A score for every token of the vocabulary, by a matrix of its own or by the embedding's.

Tied: Press & Wolf 2017, arXiv:1608.05859.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Head, UserError


class Vocabulary(Head):
    """bias: one number per token, added."""

    examples = ({}, {"bias": True})

    def __init__(self, width: int, vocab: int, bias: bool = False):
        super().__init__()
        self.table = nn.Parameter(nn.init.normal_(nn.Linear(width, vocab).weight.detach(), std=width**-0.5))
        self.bias = nn.Parameter(nn.init.zeros_(self.table.new_empty(vocab))) if bias else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return F.linear(x, self.table, self.bias)

    def share(self, table: nn.Parameter) -> None:
        if table.shape != self.table.shape:
            raise UserError(f"a head over {tuple(self.table.shape)} cannot be tied to a table of {tuple(table.shape)}")
        self.table = table

    def flops(self, length: int) -> int:
        return 2 * length * self.table.numel()
