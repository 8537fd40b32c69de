"""ResiDual: a post-norm stream, and beside it an unnormalized residual stream through which gradients reach the first
layers.

    x <- norm(x + f(x))      r <- r + s f(x)          initially r = s x         output a x + norm(r)

The norm of the output is that of the stack: give it one, with a small eps where s is small.
Xie et al. 2023, "ResiDual", arXiv:2304.14802.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, Wiring, part
from regard.core.stack import Branch

TwoStreams = tuple[Tensor, Tensor]


class Residual(Wiring):
    """alpha:  a above.
    scale:     s above; values below 1 keep the sum small in half precision.
    dropout:   dropout on the output of each branch.
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

    def enter(self, x: Tensor) -> TwoStreams:
        return x, self.scale * x

    def forward(self, stream: TwoStreams, branches: Sequence[Branch], context: Context) -> TwoStreams:
        x, total = stream
        for norm, branch in zip(self.norms, branches, strict=True):
            added = self.drop(branch(x))
            x, total = norm(x + added, context.valid), total + self.scale * added
        return x, total

    def leave(self, stream: TwoStreams, norm: Norm, context: Context) -> Tensor:
        x, total = stream
        return self.alpha * x + norm(total, context.valid)
