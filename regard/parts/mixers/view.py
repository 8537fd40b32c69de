"""A view: a layer of the decoder looks at a layer of the encoder of its own choice instead of the last one, so that
fine and coarse pictures of the source are both at hand.

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
    """mixer: what looks at it: anything that looks at the memory.
    of:       the encoder's layer: "aligned", at the same height; "reversed", the last for the first layer of the
              decoder and so on down; "last", as everywhere else; or its number, from 0, or from the end as -1, -2, ...
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
            raise UserError("a view needs an encoder whose layers it can choose from")
        self.width, self.layer = width, _layer(of, place)
        self.mixer = part(Mixer, mixer, width=width, heads=heads, depth=depth, dropout=dropout, place=place)

    @property
    def out_width(self) -> int:
        return self.mixer.out_width

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.mixer.streams

    def start(self, context: Context, capacity: int) -> tuple:
        return self.mixer.start(self._turn(context), capacity)

    def step(self, x: Tensor, state: tuple, context: Context) -> tuple[Tensor, tuple]:
        return self.mixer.step(x, state, context)  # what it looks at is in the state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.mixer(x, self._turn(context))

    def _turn(self, context: Context) -> Context:
        """The same, with the memory that is looked at here."""
        memory = context.memory
        if memory is None or self.layer >= len(memory.layer_outputs):
            raise UserError(
                f"a view of encoder layer {self.layer} needs a memory that holds it: the one that `encode` makes does"
            )
        return replace(context, memory=memory._replace(x=memory.layer_outputs[self.layer]))

    def cost(self, length: int, past: int = 0) -> Cost:
        return self.mixer.cost(length, past)

    def growth(self) -> Growth:
        return self.mixer.growth()

    def value_path(self) -> Iterator[Tensor]:
        return self.mixer.value_path()


def _layer(of: str | int, place: Place) -> int:
    """The number of an encoder layer, from 0. Where the two stacks differ in depth, heights are told in proportion."""
    count = place.encoder
    if isinstance(of, int):
        if not -count <= of < count:
            raise UserError(f"of = {of} names no layer of an encoder with {count}: they are counted from 0")
        return of % count
    if of not in CHOICES:
        raise UserError(f"unknown of = '{of}'{nearest(of, CHOICES)}, or a number")
    if of == "last":
        return count - 1
    height = place.index + 1 if of == "aligned" else place.decoder - place.index
    return min(max(-(-height * count // place.decoder), 1), count) - 1
