"""Sandwich norm: one norm before each branch and one after it, which bounds what is added to the stream.

    x <- x + norm(f(norm(x)))

Needs a norm after the last layer. Ding et al. 2021, "CogView", arXiv:2105.13290; also in Gemma 2 and 3.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, Wiring, part
from regard.core.stack import Branch


class Sandwich(Wiring):
    """norm:  the kind of both norms.
    dropout:  dropout on the output of each branch.
    """

    examples = ({}, {"norm": "rms"})

    def __init__(self, width: int, branches: int, norm: Norm | str | dict = "layer", dropout: float = 0.0):
        super().__init__()
        self.before = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.after = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for before, after, branch in zip(self.before, self.after, branches, strict=True):
            stream = self.drop.add(stream, after(branch(before(stream, context.valid)), context.valid))
        return stream
