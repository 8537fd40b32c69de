"""Full attention: every query attends to every key."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import Pattern


@dataclass(frozen=True)
class Everything(Pattern):
    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        query_at, _ = torch.broadcast_tensors(query_at, key_at)  # `torch.broadcast_shapes` would import sympy
        return torch.ones_like(query_at, dtype=torch.bool, device=key_at.device, memory_format=torch.contiguous_format)
