"""ReZero: no norm; the output of the branches is scaled by one learned scalar per layer, initialized to zero.

    x <- x + a f(x)

Bachlechner et al. 2020, "ReZero is All You Need", arXiv:2003.04887.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.core import Context, Dropout, Wiring
from regard.core.stack import Branch


class Rezero(Wiring):
    """dropout: dropout on the output of each branch."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.alpha = nn.Parameter(nn.init.zeros_(torch.empty(())))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for branch in branches:
            stream = stream + self.alpha * self.drop(branch(stream))
        return stream
