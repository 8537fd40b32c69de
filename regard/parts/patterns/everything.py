"""Full attention: every query attends to every key."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core import Pattern


@dataclass(frozen=True)
class Everything(Pattern):
    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(query_at.shape, key_at.shape)
        return torch.ones(shape, dtype=torch.bool, device=key_at.device)
