"""Document mask: a query attends only to keys of its own document, where several documents are packed into one row.

    id of the query == id of the key

Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination", arXiv:2107.02027.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError


@dataclass(frozen=True, eq=False)
class Segment(Pattern):
    """ids: (batch, time) integers, the document of each position; positions beyond them belong to no document. Passed
    with a batch, never in a recipe."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"ids": torch.tensor([[0] * 15 + [1] * 10 + [2] * 13, [5] * 3 + [4] * 34 + [5]], device="cpu")},
    )
    ids: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.ids, Tensor):
            raise UserError("segment needs the ids of a batch, a tensor: it belongs in a call, not in a recipe")
        if self.ids.dim() != 2 or not self.ids.numel() or self.ids.is_floating_point():
            raise UserError(f"ids of segment must be (batch, time) whole numbers, not {tuple(self.ids.shape)}")

    @property
    def fixed(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        ids = self.ids.to(key_at.device)
        rows = torch.arange(len(ids), device=ids.device)[:, None, None, None]
        last = ids.shape[1] - 1
        inside = [(at >= 0) & (at <= last) for at in (query_at, key_at)]
        of_query, of_key = (ids[rows, at.clamp(0, last).long()] for at in (query_at, key_at))
        return (of_query == of_key) & inside[0] & inside[1]
