"""CRATE's layer: the output of the last branch replaces the stream; the others are added to it.

    x <- x + f(norm(x))         x <- g(norm(x))

Compression updates the vectors, and sparse coding gives new ones. The tap `between` sees the stream between the two. Yu
et al. 2023, "White-Box Transformers via Sparse Rate Reduction", arXiv:2306.01129.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, Tap, Wiring, part
from regard.core.stack import Branch


class Crate(Wiring):
    """dropout: dropout on the output of each branch."""

    def __init__(self, width: int, branches: int, norm: Norm | str | dict = "layer", dropout: float = 0.0):
        super().__init__()
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)
        self.between = Tap()

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for norm, branch in zip(self.norms[:-1], branches[:-1], strict=True):
            stream = self.drop.add(stream, branch(norm(stream, context.valid)))
        return branches[-1](self.norms[-1](self.between(stream), context.valid))
