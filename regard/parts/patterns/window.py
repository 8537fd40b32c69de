"""Only the neighbours: local attention.

Beltagy et al. 2020, "Longformer", arXiv:2004.05150, and many before.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Pattern, UserError


@dataclass(frozen=True)
class Window(Pattern):
    """Keys fewer than `size` places before the query, itself included, and up to `ahead` after it (as many as before,
    unless said)."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"size": 4}, {"size": 3, "ahead": 0}, {"size": 2, "ahead": 5})
    size: int
    ahead: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1 or (self.ahead is not None and self.ahead < 0):
            raise UserError(f"a window needs size >= 1 and ahead >= 0, not {self.size} and {self.ahead}")

    @property
    def causal(self) -> bool:
        return self.ahead == 0 or (self.ahead is None and self.size == 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        age = query_at - key_at
        return (age < self.size) & (age >= -(self.size - 1 if self.ahead is None else self.ahead))

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return now - key_at < self.size
