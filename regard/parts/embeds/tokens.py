"""A vector per token, scaled by the root of the width as in the original Transformer, and its place added."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Embed, Norm, Position, UserError, part


class Tokens(Embed):
    """scale:  multiply by sqrt(width), so that a table tied to the output is right for both.
    position:  added to the vectors: sinusoidal, learned, ...
    norm:      after that.
    """

    examples = ({}, {"scale": False, "position": "sinusoidal", "norm": "layer"})

    def __init__(
        self,
        width: int,
        vocab: int,
        scale: bool = True,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "none",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.vocab = vocab
        self.scale = math.sqrt(width) if scale else 1.0
        self.table = nn.Parameter(nn.init.normal_(nn.Embedding(vocab, width).weight.detach(), std=width**-0.5))
        self.position = part(Position, position, width=width)
        if any(self.position.acts(place) for place in ("query", "key", "bias", "read")):
            raise UserError(f"position '{type(self.position).__name__.lower()}' acts in attention: name it there")
        self.norm = part(Norm, norm, width=width)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        x = F.embedding(tokens, self.table) * self.scale
        at = context.positions[:1] if context.fresh else context.positions
        return self.drop(self.norm(self.position.embed(x, at), context.valid))

    def share(self, table: nn.Parameter) -> None:
        self.table = table
