"""Fixed attention: a query attends to its own block, and to the last columns of every block, which learn to summarize
it.

    query // every == key // every    or    (every - 1 - key % every) // summary == head % turns

Child et al. 2019, "Generating Long Sequences with Sparse Transformers", arXiv:1904.10509: heads of the same layer
attend to different summary columns. In the paper it is `causal & fixed(...)`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError
from regard.pattern.algebra import check_int


@dataclass(frozen=True)
class Fixed(Pattern):
    """every:   positions in a block (the paper's l).
    summary: number of columns at the end of a block that all queries see (the paper's c).
    turns:   head 0 sees the last `summary` columns, head 1 the ones before them, and so on, cycling after `turns`
             heads.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"every": 8},
        {"every": 9, "summary": 2, "turns": 3},
    )
    every: int
    summary: int = 1
    turns: int = 1

    def __post_init__(self) -> None:
        check_int("fixed.every", self.every, 1)
        check_int("fixed.summary", self.summary, 1)
        check_int("fixed.turns", self.turns, 1, most=1024)
        if self.summary * self.turns > self.every:
            raise UserError(f"{self.turns} turns of {self.summary} columns do not fit into a block of {self.every}")

    @property
    def heads(self) -> int:
        return self.turns

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        own = query_at // self.every == key_at // self.every
        summary = self._summary_index(key_at)
        if self.turns == 1:
            return own | (summary == 0)
        return own | (summary == torch.arange(self.turns, device=key_at.device)[:, None, None])

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return (key_at // self.every >= now // self.every) | (self._summary_index(key_at) < self.turns)

    def _summary_index(self, key_at: Tensor) -> Tensor:
        """Return the index of the group of summary columns that holds each key, counted from the end of its block."""
        return (self.every - 1 - key_at % self.every) // self.summary
