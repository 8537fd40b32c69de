"""Dilated segments: within each segment, a head uses every `rate`-th position, and these attend to each other. Heads
start at different offsets, so that together they cover all positions.

    query // segment == key // segment    and    query % segment, key % segment = offset(head) modulo rate

Ding et al. 2023, "LongNet: Scaling Transformers to 1,000,000,000 Tokens", arXiv:2307.02486. A position
that a head skips attends to nothing in that head, so a comb is combined with other patterns.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Comb(Pattern):
    """segment: positions in a segment.
    rate:    distance between two positions that attend to each other.
    offsets: first position that each head uses in a segment, cycled over the heads: comb(64, 4, offsets=(0, 1, 2, 3)).
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"segment": 7, "rate": 1},
        {"segment": 8, "rate": 3, "offsets": (0, 2)},
        {"segment": 12, "rate": 2, "offsets": (0, 0, 1)},
    )
    segment: int
    rate: int
    offsets: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        check_int("comb.segment", self.segment, 1)
        check_int("comb.rate", self.rate, 1)
        if self.rate > self.segment:
            raise UserError(f"a comb of rate {self.rate} does not fit into segments of {self.segment}: lower the rate")
        if not isinstance(self.offsets, tuple | list) or not self.offsets:
            raise UserError(f"offsets of comb lists where heads begin, such as offsets=(0, 1), not {self.offsets!r}")
        for offset in self.offsets:
            check_int("an offset of comb", offset, 0, most=self.rate - 1)
        object.__setattr__(self, "offsets", tuple(self.offsets))

    @property
    def heads(self) -> int:
        return len(self.offsets)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        same = (query_at // self.segment == key_at // self.segment) & (self._phase(query_at) == self._phase(key_at))
        if len(self.offsets) == 1:
            return same & (self._phase(key_at) == self.offsets[0])
        offsets = torch.tensor(self.offsets, dtype=key_at.dtype, device=key_at.device)
        return same & (self._phase(key_at) == offsets[:, None, None])

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        offsets = torch.tensor(sorted(set(self.offsets)), dtype=key_at.dtype, device=key_at.device)
        wanted = torch.isin(self._phase(key_at), offsets)
        return (key_at // self.segment >= now // self.segment) & wanted

    def kin(self, at: Tensor) -> Tensor:
        return at // self.segment * self.rate + self._phase(at)

    def _phase(self, at: Tensor) -> Tensor:
        return at % self.segment % self.rate
