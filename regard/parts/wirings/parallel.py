"""Parallel branches: attention and feed-forward read the same input, and both outputs are added to the stream.

    x <- x + f(norm(x)) + g(norm(x))

Needs a norm after the last layer. Wang & Komatsuzaki 2021, GPT-J; Chowdhery et al. 2022, "PaLM", arXiv:2204.02311.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from regard.core import Context, Dropout, Norm, UserError, Wiring, part
from regard.core.stack import Branch


class Parallel(Wiring):
    """norms: "shared": one norm for all branches, as in GPT-J; "separate": one each, as in GPT-NeoX.
    dropout:  dropout on the output of each branch.
    """

    examples = ({}, {"norm": "rms", "norms": "separate"})

    def __init__(
        self,
        width: int,
        branches: int,
        norm: Norm | str | dict = "layer",
        norms: str = "shared",
        dropout: float = 0.0,
    ):
        super().__init__()
        if norms not in ("shared", "separate"):
            raise UserError(f"norms must be 'shared' or 'separate', not '{norms}'")
        count = 1 if norms == "shared" else branches
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(count))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        normed = [norm(stream, context.valid) for norm in self.norms]
        if len(normed) == 1:
            normed = normed * len(branches)
        return stream + sum(self.drop(branch(x)) for branch, x in zip(branches, normed, strict=True))
