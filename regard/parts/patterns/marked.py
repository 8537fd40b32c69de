"""Every query attends to the keys that are marked in the batch, such as the question before a document.

    marks[row, key]

Beltagy et al. 2020, "Longformer", arXiv:2004.05150: the tokens of a question are seen by all of the document.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core import Pattern, UserError


@dataclass(frozen=True, eq=False)
class Marked(Pattern):
    """marks: (batch, time) True where every query may attend to the key. Passed with a batch, never in a recipe."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"marks": torch.tensor([[True, False, True] * 13, [False] * 30 + [True] * 9], device="cpu")},
    )
    marks: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.marks, Tensor):
            raise UserError("marked needs the marks of a batch, a tensor: it belongs in a call, not in a recipe")
        if self.marks.dim() != 2 or not self.marks.numel() or self.marks.dtype != torch.bool:
            raise UserError(f"marks must be (batch, time) of True and False, not {tuple(self.marks.shape)}")

    @property
    def fixed(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return self.marks.shape[0]

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        marks, last = self.marks.to(key_at.device), self.marks.shape[1] - 1
        rows = torch.arange(len(marks), device=marks.device)[:, None, None, None]
        seen = marks[rows, key_at.clamp(0, last).long()] & (key_at >= 0) & (key_at <= last)
        return torch.broadcast_tensors(seen, query_at)[0]
