"""No residual: branches are applied one after the other, as in recurrent encoder-decoders. Widths may change."""

from collections.abc import Sequence

from torch import Tensor

from regard.core import Context, Dropout, Wiring
from regard.core.stack import Branch


class Plain(Wiring):
    """dropout: dropout on the output of each branch."""

    residual = False

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for branch in branches:
            stream = self.drop(branch(stream))
        return stream
