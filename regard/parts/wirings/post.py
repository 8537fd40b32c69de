"""Post-norm: the sum of the stream and the branch is normalized, as in the original Transformer.

    x <- norm(x + f(x))

Vaswani et al. 2017, arXiv:1706.03762.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, Wiring, part
from regard.core.stack import Branch


class Post(Wiring):
    """dropout: dropout on the output of each branch."""

    def __init__(self, width: int, branches: int, norm: Norm | str | dict = "layer", dropout: float = 0.0):
        super().__init__()
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for norm, branch in zip(self.norms, branches, strict=True):
            stream = norm(self.drop.add(stream, branch(stream)), context.valid)
        return stream

    def norms_around(self, index: int) -> tuple[Norm | None, Norm | None]:
        return None, self.norms[index]  # type: ignore[return-value]
