"""Prefix attention: every query attends to the first `count` keys, so that a prompt is read in both directions before
a text that is generated from left to right.

    key < count        in `causal | prefix(count)`

Raffel et al. 2020, "Exploring the Limits of Transfer Learning" (T5), arXiv:1910.10683; Dong et al. 2019, "UniLM",
arXiv:1905.03197.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError
from regard.pattern.algebra import check_int


@dataclass(frozen=True, eq=False)
class Prefix(Pattern):
    """count: length of the prefix, or a tensor (batch,) with the length in each row."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"count": 7}, {"count": torch.tensor([4, 11], device="cpu")})
    count: int | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.count, Tensor):
            check_int("prefix.count", self.count, 0)
        elif self.count.dim() != 1 or not len(self.count) or self.count.is_floating_point():
            raise UserError(f"count of a prefix is a number or (batch,) whole numbers, not {tuple(self.count.shape)}")

    @property
    def fixed(self) -> bool:
        return not isinstance(self.count, Tensor)

    @property
    def rows(self) -> int:
        return len(self.count) if isinstance(self.count, Tensor) else 1

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        if isinstance(self.count, Tensor):
            inside = key_at < self.count.to(key_at.device)[:, None, None, None]
        else:
            inside = key_at < self.count
        return torch.broadcast_tensors(inside, query_at)[0]

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        longest = self.count if isinstance(self.count, int) else int(self.count.max())
        return torch.broadcast_tensors(key_at < longest, now)[0]
