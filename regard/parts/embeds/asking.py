"""Token embedding with one more learned vector for positions to predict, which starts the query stream of XLNet.

    x = E[token],        x = w where the token id is negative

Yang et al. 2019, "XLNet", arXiv:1906.08237.
"""

import math

import torch
from torch import Tensor, nn

from regard.core import Context, Embed, Norm, Position
from regard.core.contracts import look_up, new_table


class Asking(Embed):
    """scale: multiply the token's vector by sqrt(width).
    position: position added to the vectors; XLNet has relative positions in its attention instead.
    norm:     norm after that.
    """

    examples = ({}, {"scale": True, "position": "sinusoidal", "norm": "layer"})

    def __init__(
        self,
        width: int,
        vocab: int,
        scale: bool = False,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
    ):
        super().__init__(width, position, norm, dropout)
        self.vocab = vocab
        self.scale = math.sqrt(width) if scale else 1.0
        self.table = new_table(vocab, width)
        self.asked = nn.Parameter(torch.empty(width).normal_(std=width**-0.5))

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = look_up(self.table, tokens.clamp(min=0), "tokens") * self.scale
        return self.add_position(torch.where((tokens < 0)[..., None], self.asked, x), context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randint(self.vocab, (batch, time))
