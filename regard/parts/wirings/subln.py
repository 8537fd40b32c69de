"""Sub-LN: pre-norm with a second norm inside each branch, before its output projection, and a scaled initialization.

    x <- x + W_out norm(inside(norm(x)))         value, output and feed-forward weights times g at initialization

                          g
    one stack of N        sqrt(log 2N)
    encoder of N, with    sqrt(log 2N log 3M / 3)
    decoder of M          sqrt(log 3M)

Cross-attention is not changed. Needs a norm after the last layer.
Wang et al. 2022, "Magneto", arXiv:2210.06423.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.core import Context, Dropout, Mixer, Norm, Place, Wiring, find, part
from regard.core.stack import Branch


class Subln(Wiring):
    """norm:  the kind of both norms, the one before a branch and the one inside it.
    gain:     g above; None: derived from the depths.
    dropout:  dropout on the output of each branch.
    """

    examples = ({}, {"norm": "rms", "gain": 1.2})

    def __init__(
        self,
        width: int,
        branches: int,
        place: Place,
        norm: Norm | str | dict = "layer",
        gain: float | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.gain = scale(place) if gain is None else gain
        self.norm = norm
        self.norms = nn.ModuleList(part(Norm, norm, width=width) for _ in range(branches))
        self.drop = Dropout(dropout)

    def forward(self, stream: Tensor, branches: Sequence[Branch], context: Context) -> Tensor:
        for norm, branch in zip(self.norms, branches, strict=True):
            stream = self.drop.add(stream, branch(norm(stream, context.valid)))
        return stream

    @torch.no_grad()
    def prepare(self, mixer: Mixer) -> None:
        if getattr(mixer, "over", "self") == "memory":
            return
        norm, out = getattr(mixer, "norm", None), getattr(mixer, "out", None)
        if isinstance(norm, find(Norm, "none")) and isinstance(out, nn.Linear):
            mixer.norm = part(Norm, self.norm, width=out.in_features)
        for weight in mixer.value_path():
            weight.mul_(self.gain)


def scale(place: Place) -> float:
    """Return g for this layer."""
    n, m = place.encoder, place.decoder
    if not n or not m:
        return math.sqrt(math.log(2 * (n or m)))
    if place.side == "encoder":
        return math.sqrt(math.log(2 * n) * math.log(3 * m) / 3)
    return math.sqrt(math.log(3 * m))
