"""Dropout that costs little: on a CPU, drawing a random number per channel takes longer than all else about it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError

STEPS = 1 << 16  # 16 random bits decide, four times in one draw


class Dropout(nn.Module):
    """y = x / (1 - rate) where it is kept, 0 elsewhere. On a CPU the rate is a whole number of 65536ths."""

    def __init__(self, rate: float = 0.0):
        super().__init__()
        if not 0 <= rate <= 1:
            raise UserError(f"dropout must be from 0 to 1, not {rate}")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        if x.device.type != "cpu" or self.rate == 1:
            return F.dropout(x, self.rate)
        dropped = min(round(self.rate * STEPS), STEPS - 1)
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        kept = draws.view(torch.int16)[: x.numel()].view(x.shape) >= dropped - STEPS // 2
        return (x * kept).mul_(STEPS / (STEPS - dropped))

    def extra_repr(self) -> str:
        return f"{self.rate}"
