"""Attention sinks: every query attends to the first `count` keys, which absorb attention that has nowhere to go.

    key < count

Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453:
`causal & (window(1020) | first(4))`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class First(Pattern):
    """count: number of keys from the start of the sequence."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"count": 3},)
    count: int

    def __post_init__(self) -> None:
        check_int("first.count", self.count, 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return torch.broadcast_tensors(key_at < self.count, query_at)[0]

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return torch.broadcast_tensors(key_at < self.count, now)[0]
