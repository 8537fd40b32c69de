"""Two mixers in parallel on the same input, whose outputs are added.

    y = left(x) + right(x)

For example self-attention and cross-attention in one branch: So et al. 2019, "The Evolved Transformer",
arXiv:1901.11117.
"""

from __future__ import annotations

from torch import Tensor

from regard.bases.beside import Beside, Sides
from regard.core import Context, Mixer, Place, UserError, part


class Sum(Beside):
    """left, right: the mixers. Each has as many heads as the layer unless it sets its own."""

    examples = (
        {"left": {"part": "attention", "heads": 6}, "right": {"part": "attention", "over": "memory"}},
        {"left": {"part": "attention", "pattern": "everything"}, "right": "mean"},
    )

    def __init__(
        self,
        width: int,
        left: Mixer | str | dict,
        right: Mixer | str | dict,
        heads: int = 1,
        depth: int = 1,
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        self.width = width
        inherited = {"heads": heads, "depth": depth, "dropout": dropout, "place": place}

        def make(side: str, spec: Mixer | str | dict) -> Mixer:
            try:
                return part(Mixer, spec, width=width, **inherited)
            except UserError as error:
                raise UserError(error.message, (side, *error.path[1:])) from None

        self.left, self.right = make("left", left), make("right", right)
        if self.left.out_width != self.right.out_width:
            raise UserError(
                f"left has {self.left.out_width} output channels and right {self.right.out_width}: make them equal"
            )

    @property
    def out_width(self) -> int:
        return self.left.out_width

    def step(self, x: Tensor, state: Sides, context: Context) -> tuple[Tensor, Sides]:
        left, left_state = self.left.step(x, state.left, context)
        right, right_state = self.right.step(x, state.right, context)
        return left + right, Sides(left_state, right_state)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.left(x, context) + self.right(x, context)
