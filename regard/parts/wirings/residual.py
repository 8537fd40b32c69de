"""ResiDual: a post-norm stream for rich layers beside a stream of bare sums for gradients that reach the bottom.

    x <- norm(x + f(x))      r <- r + s f(x)          at first r = s x          at last a x + norm(r)

The last norm is the stack's own: give it one, with a small eps where s is small.
Xie et al. 2023, "ResiDual", arXiv:2304.14802.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, Wiring, part
from regard.core.wiring import Branch

Two = tuple[Tensor, Tensor]


class Residual(Wiring):
    """alpha:  a above.
    scale:     s above; below 1 it keeps the sum small in half precision.
    dropout:   of what a branch adds.
    """

    examples = ({}, {"norm": "rms", "alpha": 0.7, "scale": 0.5})
    lanes = 2

    def __init__(
        self,
        width: int,
        branches: int,
        norm: Norm | str | dict = "layer",
        alpha: float = 1.0,
        scale: float = 1.0,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.alpha, self.scale = alpha, scale
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def enter(self, x: Tensor) -> Two:
        return x, self.scale * x

    def forward(self, stream: Two, branches: Sequence[Branch], context: Context) -> Two:
        x, total = stream
        for norm, branch in zip(self.norms, branches, strict=True):
            added = self.drop(branch(x))
            x, total = norm(x + added, context.valid), total + self.scale * added
        return x, total

    def leave(self, stream: Two, norm: Norm, context: Context) -> Tensor:
        x, total = stream
        return self.alpha * x + norm(total, context.valid)
