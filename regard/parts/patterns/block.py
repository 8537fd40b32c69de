"""Block attention: a query attends to the keys of its own block, and to some keys just before or after that block.
Covers block-diagonal attention, segments with a memory, and windows of whole blocks.

    query // size * size - before  <=  key  <  (query // size + 1) * size + after

Qiu et al. 2019, "Blockwise Self-Attention for Long Document Understanding", arXiv:1911.02972. With a memory: Dai et al.
2019, "Transformer-XL", arXiv:1901.02860, `causal & block(512, before=512)`. With both neighbors: Zaheer et al. 2020,
"Big Bird", arXiv:2007.14062, `block(64, 64, 64)`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Block(Pattern):
    """size: positions in a block.
    before: positions before the block that all of its queries also see.
    after: positions after the block that all of its queries also see.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"size": 6},
        {"size": 5, "before": 3},
        {"size": 3, "before": 8},
        {"size": 4, "before": 4, "after": 2},
    )
    size: int
    before: int = 0
    after: int = 0

    def __post_init__(self) -> None:
        check_int("block.size", self.size, 1)
        check_int("block.before", self.before, 0)
        check_int("block.after", self.after, 0)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        offset = key_at - query_at // self.size * self.size  # from the start of the query's block
        return (offset >= -self.before) & (offset < self.size + self.after)

    def reaching(self, positions: int) -> Pattern:
        return replace(self, before=positions)

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return key_at >= now // self.size * self.size - self.before
