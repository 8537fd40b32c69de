"""Pre-norm: a branch reads the normalized stream, and its output is added to the stream itself.

    x <- x + f(norm(x))

Needs a norm after the last layer. Xiong et al. 2020, arXiv:2002.04745.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, Wiring, part
from regard.core.stack import Branch


class Pre(Wiring):
    """dropout: dropout on the output of each branch."""

    def __init__(self, width: int, branches: int, norm: Norm | str | dict = "layer", dropout: float = 0.0):
        super().__init__()
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for norm, branch in zip(self.norms, branches, strict=True):
            stream = self.drop.add(stream, branch(norm(stream, context.valid)))
        return stream

    def norms_around(self, index: int) -> tuple[Norm | None, Norm | None]:
        return self.norms[index], None  # type: ignore[return-value]
