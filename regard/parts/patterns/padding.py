"""Padding mask: a query attends only to the keys within the length of its row.

    key < length of its row

Models already do this from `valid`; this pattern is for combining it with others by hand.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError


@dataclass(frozen=True, eq=False)
class Padding(Pattern):
    """lengths: (batch,) number of valid positions in each row. Passed with a batch, never in a recipe."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"lengths": torch.tensor([13, 40], device="cpu")},)
    lengths: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.lengths, Tensor):
            raise UserError("padding needs the lengths of a batch, a tensor: it belongs in a call, not in a recipe")
        if self.lengths.dim() != 1 or not len(self.lengths) or self.lengths.is_floating_point():
            raise UserError(f"lengths of padding must be (batch,) whole numbers, not {tuple(self.lengths.shape)}")

    @property
    def fixed(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        real = key_at < self.lengths.to(key_at.device)[:, None, None, None]
        return torch.broadcast_tensors(real, query_at)[0]

    def keeps(self, key_at: Tensor, now: Tensor) -> Tensor:
        return torch.broadcast_tensors(key_at < int(self.lengths.max()), now)[0]
