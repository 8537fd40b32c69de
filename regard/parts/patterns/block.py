"""Blocks that see only themselves: block-diagonal attention.

    query // size == key // size

Qiu et al. 2019, "Blockwise Self-Attention for Long Document Understanding", arXiv:1911.02972.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Pattern
from regard.core.pattern import whole


@dataclass(frozen=True)
class Block(Pattern):
    """size: positions of a block."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"size": 6},)
    size: int

    def __post_init__(self) -> None:
        whole("block.size", self.size, 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return query_at // self.size == key_at // self.size

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return key_at // self.size >= now // self.size
