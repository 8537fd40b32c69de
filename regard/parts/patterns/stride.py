"""Strided attention: a query attends to every `every`-th key at any distance. Combined with a window, it reaches all
keys in two layers.

    query - key a multiple of every

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509, where it is combined with a
window: `causal & heads(window(128), stride(128))`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Stride(Pattern):
    """every: distance between two positions that attend to each other, in both directions."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"every": 7},)
    every: int

    def __post_init__(self) -> None:
        check_int("stride.every", self.every, 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return (query_at - key_at) % self.every == 0

    def kin(self, at: Tensor) -> Tensor:
        return at % self.every
