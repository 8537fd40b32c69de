"""The base of mixers that run two mixers in parallel; a part joins their outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from regard.core import Context, Cost, Growth, Mixer


class Sides(NamedTuple):
    """The states of the two mixers."""

    left: Any
    right: Any


class Beside(Mixer[Sides]):
    """The part sets `left` and `right`, and defines `step` and `forward`."""

    left: Mixer
    right: Mixer

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.left.streams and self.right.streams

    def start(self, context: Context, capacity: int) -> Sides:
        return Sides(self.left.start(context, capacity), self.right.start(context, capacity))

    def cost(self, length: int, past: int = 0) -> Cost:
        left, right = self.left.cost(length, past), self.right.cost(length, past)
        return Cost(left.flops + right.flops, left.state + right.state if self.streams else 0)

    def growth(self) -> Growth:
        return self.left.growth().combine(self.right.growth())

    def value_path(self) -> Iterator[Tensor]:
        yield from self.left.value_path()
        yield from self.right.value_path()
