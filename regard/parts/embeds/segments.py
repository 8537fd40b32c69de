"""Token embedding plus an embedding of the segment, so that the model can tell the two sentences of a pair apart.

    x = norm(E[token] + S[segment] + p)

Devlin et al. 2019, "BERT", arXiv:1810.04805.
"""

import math

import torch
from torch import Tensor

from regard.core import Context, Embed, Norm, Position, UserError
from regard.core.contracts import look_up, new_table


class Segments(Embed):
    """types:  number of segment types; a batch without segments is all of type 0.
    scale:     multiply the token's vector by sqrt(width); BERT does not.
    position:  position added to the vectors: learned in BERT.
    norm:      norm after that.
    dim:       channels of the tables, projected to the width at the end (ALBERT); None: the width.
    """

    examples = ({}, {"types": 3, "position": "sinusoidal", "norm": "none"}, {"dim": 10, "scale": True})

    def __init__(
        self,
        width: int,
        vocab: int,
        types: int = 2,
        scale: bool = False,
        position: Position | str | dict = "none",
        norm: Norm | str | dict = "layer",
        dropout: float = 0.0,
        dim: int | None = None,
    ):
        super().__init__(width, position, norm, dropout, dim)
        if types < 1:
            raise UserError(f"types must be at least 1, not {types}")
        self.vocab = vocab
        self.scale = math.sqrt(self.dim) if scale else 1.0
        self.table = new_table(vocab, self.dim)
        self.segment_table = new_table(types, self.dim)

    def forward(self, tokens: Tensor, context: Context) -> Tensor:
        segments = torch.zeros_like(tokens) if context.segments is None else context.segments
        x = look_up(self.table, tokens, "tokens") * self.scale + look_up(self.segment_table, segments, "segments")
        return self.add_position(x, context)

    def random_input(self, batch: int, time: int) -> Tensor:
        return torch.randint(self.vocab, (batch, time))
