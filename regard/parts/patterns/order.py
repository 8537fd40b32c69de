"""Permuted factorization order: a query attends to the keys that come before it in the order of its own sequence, and
to all keys of rank 0.

    rank(key) = 0     or     rank(key) < rank(query)

Yang et al. 2019, "XLNet", arXiv:1906.08237.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError


@dataclass(frozen=True, eq=False)
class Order(Pattern):
    """ranks: (batch, time) integers from 0. Passed with a batch, never in a recipe.
    begin: position of the first rank. All positions before it are visible, those after the last rank are not.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"ranks": torch.tensor([[0, 3, 1, 0, 2, 4, 0] * 6, [2, 0, 1, 3, 0, 0, 5] * 6], device="cpu")},
        {"ranks": torch.tensor([[4, 0, 1, 0, 2, 3] * 6], device="cpu"), "begin": 5},
    )
    ranks: Tensor
    begin: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, Tensor):
            raise UserError("order needs the ranks of a batch, a tensor: it belongs in a call, not in a recipe")
        if self.ranks.dim() != 2 or not self.ranks.numel() or self.ranks.is_floating_point():
            raise UserError(f"ranks of order must be (batch, time) whole numbers, not {tuple(self.ranks.shape)}")

    @property
    def fixed(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.ranks.shape[0]

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        of_query, of_key = self._rank(query_at), self._rank(key_at)
        inside = (key_at >= 0) & (key_at < self.begin + self.ranks.shape[1])
        return ((of_key == 0) | (of_key < of_query)) & inside

    def _rank(self, at: Tensor) -> Tensor:
        ranks = self.ranks.to(at.device)
        rows = torch.arange(len(ranks), device=at.device)[:, None, None, None]
        place = at - self.begin
        inside = (place >= 0) & (place < ranks.shape[1])
        return torch.where(inside, ranks[rows, place.clamp(0, ranks.shape[1] - 1).long()], 0)
