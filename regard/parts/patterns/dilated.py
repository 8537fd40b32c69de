"""A dilated window: a query attends to neighbors at every `rate`-th position, so that few keys reach far (also called
atrous).

    age a multiple of rate, and 0 <= age / rate < size        where age = query - key; down to -`ahead` for later keys

Beltagy et al. 2020, "Longformer", arXiv:2004.05150.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Dilated(Pattern):
    """size:  number of positions that a query sees, its own included.
    rate:  distance between two of them; 1 is a plain window.
    ahead: number of positions seen after the query; None: size - 1, as many as before it.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"size": 3, "rate": 4},
        {"size": 4, "rate": 3, "ahead": 0},
        {"size": 2, "rate": 5, "ahead": 3},
    )
    size: int
    rate: int
    ahead: int | None = None

    def __post_init__(self) -> None:
        check_int("dilated.size", self.size, 1)
        check_int("dilated.rate", self.rate, 1)
        if self.ahead is not None:
            check_int("dilated.ahead", self.ahead, 0)

    @property
    def causal(self) -> bool:
        return self.ahead == 0 or (self.ahead is None and self.size == 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        age = query_at - key_at
        steps = age // self.rate
        after = self.size - 1 if self.ahead is None else self.ahead
        return (age % self.rate == 0) & (steps < self.size) & (steps >= -after)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return -((key_at - now) // self.rate) < self.size  # age / rate, rounded up

    def kin(self, at: Tensor) -> Tensor:
        return at % self.rate
