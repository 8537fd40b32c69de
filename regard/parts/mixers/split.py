"""Two mixers in parallel, each on its own part of the channels, such as one for short and one for long range.

    y = [left(x[: share * width]); right(x[share * width :])]

Wu et al. 2020, "Lite Transformer with Long-Short Range Attention", arXiv:2004.11886.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.bases.beside import Beside, Sides
from regard.core import Context, Mixer, Place, UserError, part


class Split(Beside):
    """left, right: the mixers. Each has as many heads as the layer unless it sets its own.
    share:          share of the channels that go to the left mixer.
    """

    examples = (
        {"left": "attention", "right": {"part": "convolution", "kind": "dynamic", "size": 3}},
        {"left": "gru", "right": "mean", "share": 0.25},
        {
            "left": {"part": "attention", "pattern": "everything"},
            "right": {"part": "convolution", "causal": False, "heads": 2},
        },
    )

    def __init__(
        self,
        width: int,
        left: Mixer | str | dict,
        right: Mixer | str | dict,
        heads: int = 1,
        share: float = 0.5,
        depth: int = 1,
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        left_width = round(width * share)
        if not 0 < left_width < width:
            raise UserError(
                f"a share of {share} of {width} channels leaves one side without channels: set one between 0 and 1"
            )
        self.width, self.widths = width, (left_width, width - left_width)
        inherited = {"heads": heads, "depth": depth, "dropout": dropout, "place": place}

        def make(side: str, spec: Mixer | str | dict, channels: int) -> Mixer:
            try:
                return part(Mixer, spec, width=channels, **inherited)
            except UserError as error:
                raise UserError(error.message, (side, *error.path[1:])) from None

        self.left, self.right = make("left", left, left_width), make("right", right, width - left_width)

    @property
    def out_width(self) -> int:
        return self.left.out_width + self.right.out_width

    def step(self, x: Tensor, state: Sides, context: Context) -> tuple[Tensor, Sides]:
        near, far = x.split(self.widths, -1)
        left, left_state = self.left.step(near, state.left, context)
        right, right_state = self.right.step(far, state.right, context)
        return torch.cat((left, right), -1), Sides(left_state, right_state)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        near, far = x.split(self.widths, -1)
        return torch.cat((self.left(near, context), self.right(far, context)), -1)
