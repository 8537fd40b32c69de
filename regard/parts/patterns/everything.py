"""Everybody may look at everybody."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import Pattern


@dataclass(frozen=True)
class Everything(Pattern):
    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return torch.ones_like(query_at + key_at, dtype=torch.bool)
