"""Random block attention: each block of queries attends to a few blocks of keys, drawn at random from the seed.

    block(key) in draw(seed, block(query))        distinct blocks, by a hash of the numbers alone

Zaheer et al. 2020, "Big Bird", arXiv:2007.14062. The random
numbers are our own: nothing is stored, any position can be queried at any time, and all machines draw the same blocks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """count: number of key blocks that a query block sees; all of them when there are fewer.
    block: positions in a block.
    seed:  seed of the random draw.
    of:    None: blocks are drawn from the query's own and earlier ones, so that a decoder may step through
           `causal & ...`; otherwise the length of the sequence, from all of whose blocks they are drawn.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"count": 2, "block": 4},
        {"count": 1, "block": 3, "seed": 5, "of": 41},
    )
    count: int
    block: int = 64
    seed: int = 0
    of: int | None = None

    def __post_init__(self) -> None:
        check_int("random_blocks.count", self.count, 1, most=256)
        check_int("random_blocks.block", self.block, 1)
        check_int("random_blocks.seed", self.seed, 0)
        if self.of is not None:
            check_int("random_blocks.of", self.of, 1)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        query_block, key_block = query_at.long() // self.block, key_at.long() // self.block
        allowed = torch.zeros(
            torch.broadcast_shapes(query_block.shape, key_block.shape), dtype=torch.bool, device=key_block.device
        )
        for choice in self._draw(query_block):
            allowed = allowed | (choice == key_block)
        return allowed & (key_block >= 0)

    def _draw(self, query_block: Tensor) -> list[Tensor]:
        """Return `count` tensors of distinct key block indices for each query block, -1 where there are too few blocks.
        This is Floyd's algorithm: draw n picks among the first n candidates, and takes the newest if that one is
        taken."""
        total = query_block + 1 if self.of is None else torch.full_like(query_block, -(-self.of // self.block))
        start = _hash(_hash(torch.full_like(query_block, self.seed)) + query_block)
        chosen: list[Tensor] = []
        for draw in range(self.count):
            newest = total - self.count + draw
            choice = _hash(start + draw) % (newest + 1).clamp(min=1)
            for other in chosen:
                choice = torch.where(choice == other, newest, choice)
            chosen.append(torch.where(newest >= 0, choice, -1))
        return chosen


def _hash(x: Tensor) -> Tensor:
    """Hash integers to pseudorandom numbers below 2^32. Products stay below 2^63, so nothing overflows."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)
