"""DeepNorm: post-norm with a scaled residual and a smaller initialization of the branches, for hundreds of layers.

    x <- norm(a x + f(x))            value, output and feed-forward weights times b at initialization

                          a                        b
    one stack of N        (2 N)^(1/4)              (8 N)^(-1/4)
    encoder of N, with    0.81 (N^4 M)^(1/16)      0.87 (N^4 M)^(-1/16)
    decoder of M          (3 M)^(1/4)              (12 M)^(-1/4)

Wang et al. 2022, "DeepNet", arXiv:2203.00555.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.core import Context, Dropout, Mixer, Norm, Place, Wiring, part
from regard.core.stack import Branch


class Deepnorm(Wiring):
    """alpha, beta: a and b above; None: derived from the depths.
    dropout:        dropout on the output of each branch.
    """

    examples = ({}, {"norm": "rms", "alpha": 1.5, "beta": 0.5})

    def __init__(
        self,
        width: int,
        branches: int,
        place: Place,
        norm: Norm | str | dict = "layer",
        alpha: float | None = None,
        beta: float | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        large, small = scales(place)
        self.alpha = large if alpha is None else alpha
        self.beta = small if beta is None else beta
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for norm, branch in zip(self.norms, branches, strict=True):
            stream = norm(self.drop.add(self.alpha * stream, branch(stream)), context.valid)
        return stream

    @torch.no_grad()
    def prepare(self, mixer: Mixer) -> None:
        for weight in mixer.value_path():
            weight.mul_(self.beta)


def scales(place: Place) -> tuple[float, float]:
    """Return a and b for this layer."""
    n, m = place.encoder, place.decoder
    if not n or not m:
        return (2 * (n or m)) ** 0.25, (8 * (n or m)) ** -0.25
    if place.side == "encoder":
        return 0.81 * (n**4 * m) ** 0.0625, 0.87 * (n**4 * m) ** -0.0625
    return (3 * m) ** 0.25, (12 * m) ** -0.25
