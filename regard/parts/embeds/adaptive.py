"""Adaptive embedding: the vocabulary, sorted by frequency, is cut into groups. Groups of rarer tokens have narrower
tables, whose vectors are projected to the width.

    x = sqrt(width) U_g E_g[token]          g the group of the token, E_g with dim / divide^g channels

Baevski & Auli 2019, "Adaptive Input Representations for Neural Language Modeling", arXiv:1809.10853; Dai et al. 2019,
"Transformer-XL", arXiv:1901.02860.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.groups import Group
from regard.core import Context, Embed, UserError
from regard.core.contracts import look_up, new_table


class Adaptive(Embed):
    """cutoffs: first token id of every group after the first.
    divide:     the channels of a group are those of the group before it divided by this; 1: there is one table.
    channels:   channels of the first group; None: the width.
    scale:      multiply by sqrt(width).
    """

    examples = ({"cutoffs": [7, 18], "divide": 2}, {"channels": 10}, {"cutoffs": [5], "channels": 9, "divide": 3})

    def __init__(
        self,
        width: int,
        vocab: int,
        cutoffs: list | None = None,
        divide: int = 1,
        channels: int | None = None,
        scale: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__(width, dropout=dropout)
        self.vocab = vocab
        self.groups = Group.of(vocab, (cutoffs or []) if divide > 1 else [], divide, channels or width)
        self.scale = math.sqrt(width) if scale else 1.0
        tables = [new_table(end - begin, dim) for begin, end, dim in self.groups]
        self.table, self.tails = tables[0], nn.ParameterList(tables[1:])
        projected = divide > 1 or self.groups[0].dim != width
        self.maps = nn.ParameterList(new_table(width, group.dim) for group in self.groups if projected)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        if len(self.groups) == 1:
            x = look_up(self.table, tokens, "tokens")
            x = F.linear(x, self.maps[0]) if len(self.maps) else x
            return self.add_position(x * self.scale, context)
        low, high = (int(end) for end in tokens.aminmax()) if tokens.numel() else (0, 0)
        if low < 0 or high >= self.vocab:
            raise UserError(f"token ids are from {low} to {high}, but the vocabulary is from 0 to {self.vocab - 1}")
        x = None
        for group, table, projection in zip(self.groups, (self.table, *self.tails), self.maps, strict=True):
            inside = (tokens >= group.begin) & (tokens < group.end)
            own = F.linear(look_up(table, torch.where(inside, tokens - group.begin, 0), "tokens"), projection)
            x = own if x is None else torch.where(inside[..., None], own, x)
        assert x is not None
        return self.add_position(x * self.scale, context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randint(self.vocab, (batch, time))

    def flops(self, length: int) -> int:
        return sum(2 * length * projection.numel() for projection in self.maps)
