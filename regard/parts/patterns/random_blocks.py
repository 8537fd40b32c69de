"""Random links: each block of queries sees a few blocks of keys, always the same ones for the same seed.

    block(key) in draw(seed, block(query))        distinct blocks, by a hash of the numbers alone

Zaheer et al. 2020, "Big Bird", arXiv:2007.14062. The draws are ours: nothing is stored, any position can be asked
about at any time, and every machine gives the same answer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class RandomBlocks(Pattern):
    """count: how many blocks of keys a block of queries sees; all when there are fewer.
    block: positions of a block.
    seed:  another number, other links.
    of:    None: a block is linked to itself and blocks before it, whatever is to come, so that a decoder may step
           through `causal & ...`; else the length of the sequence, out of all whose blocks the links are drawn.
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
        looking, seen = query_at.long() // self.block, key_at.long() // self.block
        allowed = torch.zeros(torch.broadcast_shapes(looking.shape, seen.shape), dtype=torch.bool, device=seen.device)
        for choice in self._draw(looking):
            allowed = allowed | (choice == seen)
        return allowed & (seen >= 0)

    def _draw(self, looking: Tensor) -> list[Tensor]:
        """`count` different numbers below the number of blocks, for every block that looks; -1 where that is too few.
        Floyd's way: the n-th choice is among the first n that are open, and if it is taken, it is the newest."""
        total = looking + 1 if self.of is None else torch.full_like(looking, -(-self.of // self.block))
        start = _mix(_mix(torch.full_like(looking, self.seed)) + looking)
        chosen: list[Tensor] = []
        for draw in range(self.count):
            newest = total - self.count + draw
            choice = _mix(start + draw) % (newest + 1).clamp(min=1)
            for other in chosen:
                choice = torch.where(choice == other, newest, choice)
            chosen.append(torch.where(newest >= 0, choice, -1))
        return chosen


def _mix(x: Tensor) -> Tensor:
    """A number below 2^32 that looks random, from another. Products stay below 2^63, so that nothing overflows."""
    x = x & 0xFFFFFFFF
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)
