"""Layer-wise cross-attention: a decoder layer attends to the output of a chosen encoder layer instead of the last one.

    y = mixer(x, memory = output of encoder layer v(j))          in decoder layer j

Liu et al. 2020, "Layer-Wise Multi-View Decoding", arXiv:2005.08081.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from regard.core import Context, Cost, Growth, Mixer, Place, UserError, part
from regard.errors import nearest

CHOICES = ("aligned", "reversed", "last")


class View(Mixer[tuple]):
    """mixer: any mixer that attends to the memory.
    of:       the encoder layer: "aligned", at the same height; "reversed", the last one for the first decoder layer and
              so on down; "last", as usual; or its index, from 0, or from the end as -1, -2, ...
    """

    uses_layer_outputs = True
    examples = (
        {"mixer": {"part": "attention", "over": "memory"}},
        {"mixer": {"part": "sum", "left": {"part": "attention", "over": "memory"}, "right": "attention"}, "of": -1},
    )

    def __init__(
        self,
        width: int,
        mixer: Mixer | str | dict,
        of: str | int = "reversed",
        heads: int = 1,
        depth: int = 1,
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        if place is None or not place.encoder:
            raise UserError("a view needs an encoder, to attend to one of its layers")
        self.width, self.layer = width, _layer(of, place)
        self.mixer = part(Mixer, mixer, width=width, heads=heads, depth=depth, dropout=dropout, place=place)

    @property
    def out_width(self) -> int:
        return self.mixer.out_width

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.mixer.streams

    def start(self, context: Context, capacity: int) -> tuple:
        return self.mixer.start(self._with_view(context), capacity)

    def step(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple]:
        return self.mixer.step(x, state, context)  # the state holds the keys and values

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.mixer(x, self._with_view(context))

    def _with_view(self, context: Context) -> Context:
        """Return the context with the output of the chosen encoder layer as memory."""
        memory = context.memory
        if memory is None or self.layer >= len(memory.layer_outputs):
            raise UserError(
                f"a view of encoder layer {self.layer} needs a memory with the outputs of all layers, as from `encode`"
            )
        return replace(context, memory=memory._replace(x=memory.layer_outputs[self.layer]))

    def cost(self, length: int, past: int = 0) -> Cost:
        return self.mixer.cost(length, past)

    def growth(self) -> Growth:
        return self.mixer.growth()

    def value_path(self) -> Iterator[Tensor]:
        return self.mixer.value_path()


def _layer(of: str | int, place: Place) -> int:
    """Return the index of the encoder layer. If the stacks differ in depth, heights are scaled in proportion."""
    count = place.encoder
    if isinstance(of, int):
        if not -count <= of < count:
            raise UserError(f"of = {of} is no layer of an encoder with {count} layers, counted from 0")
        return of % count
    if of not in CHOICES:
        raise UserError(f"unknown of = '{of}'{nearest(of, CHOICES)}, or a number")
    if of == "last":
        return count - 1
    height = place.index + 1 if of == "aligned" else place.decoder - place.index
    return min(max(-(-height * count // place.decoder), 1), count) - 1
