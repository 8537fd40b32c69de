"""Token embedding, scaled by the square root of the width as in the original Transformer, plus a position.

    x = sqrt(width) E[token] + p        with dim: x = W (sqrt(dim) E[token] + p) + b

Vaswani et al. 2017, arXiv:1706.03762. A narrow table and a projection to the width: Lan et al. 2020, "ALBERT",
arXiv:1909.11942.
"""

import math

import torch
from torch import Tensor, nn

from regard.core import Context, Embed, Norm, Position
from regard.core.contracts import look_up, new_table
from regard.core.fusion import FusedEmbed


class Tokens(Embed):
    """scale:  multiply by sqrt(width), so that a table tied to the output has the right scale for both.
    position:  position added to the vectors: sinusoidal, learned, ...
    norm:      norm after that.
    dim:       channels of the table, projected to the width at the end (ALBERT); None: the width.
    std:       standard deviation of the initial table; None: 1/sqrt(dim). T5, which does not scale, has 1.
    """

    examples = ({}, {"scale": False, "position": "sinusoidal", "norm": "layer"}, {"dim": 10, "norm": "layer"})

    def __init__(
        self,
        width: int,
        vocab: int,
        scale: bool = True,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
        dim: int | None = None,
        std: float | None = None,
    ):
        super().__init__(width, position, norm, dropout, dim)
        self.vocab = vocab
        self.scale = math.sqrt(self.dim) if scale else 1.0
        self.table = new_table(vocab, self.dim, std)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        return self.add_position(self.vectors(tokens), context)

    def vectors(self, tokens: Tensor) -> Tensor:
        return look_up(self.table, tokens, "tokens") * self.scale

    def fused(self) -> FusedEmbed | None:
        is_added = self.position.adds_vectors or not self.position.acts("embed")
        is_all = is_added and self.norm.is_identity and type(self.up) is nn.Identity
        return FusedEmbed(self.table, self.scale, self.position) if is_all else None

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randint(self.vocab, (batch, time))
