"""Local attention: a query attends to the keys in a window around it.

    0 <= age < size        where age = query - key; down to -`ahead` for later keys

Beltagy et al. 2020, "Longformer", arXiv:2004.05150, and many before.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Window(Pattern):
    """size:  number of keys seen up to the query, its own position included.
    ahead: number of keys seen after the query; None: size - 1, as many as before it.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"size": 4}, {"size": 3, "ahead": 0}, {"size": 2, "ahead": 5})
    size: int
    ahead: int | None = None

    def __post_init__(self) -> None:
        check_int("window.size", self.size, 1)
        if self.ahead is not None:
            check_int("window.ahead", self.ahead, 0)

    @property
    def causal(self) -> bool:
        return self.ahead == 0 or (self.ahead is None and self.size == 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        age = query_at - key_at
        return (age < self.size) & (age >= -(self.size - 1 if self.ahead is None else self.ahead))

    def reaching(self, positions: int) -> Pattern:
        return replace(self, size=max(positions, 1))

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return now - key_at < self.size
