"""Dropout that costs little: on a CPU, drawing a random number per channel takes longer than all else about it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.errors import UserError
from regard.native.build import training_kernels
from regard.native.train import drop

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
        return self._drop(x, None) if self._by_hand(x) else F.dropout(x, self.rate)

    def add(self, stream: Tensor, x: Tensor) -> Tensor:
        """stream + y, in one go."""
        if not self.training:
            return stream + x
        if not self._by_hand(x) or stream.dtype != x.dtype or stream.shape != x.shape:
            return stream + self(x)
        return self._drop(x, stream)

    def _drop(self, x: Tensor, stream: Tensor | None) -> Tensor:
        known = training_kernels(x, stream)
        if known is None:
            return _Dropped.apply(x, stream, self._dropped)
        return drop(known, x, stream, self._dropped, STEPS / (STEPS - self._dropped))

    def _by_hand(self, x: Tensor) -> bool:
        return self.training and 0 < self.rate < 1 and x.device.type == "cpu" and not torch.compiler.is_compiling()

    @property
    def _dropped(self) -> int:
        """Of STEPS."""
        return min(round(self.rate * STEPS), STEPS - 1)

    def extra_repr(self) -> str:
        return f"{self.rate}"


class _Dropped(torch.autograd.Function):
    """What decides is kept for the backward, two bytes for each channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Tensor | None, dropped: int) -> Tensor:  # type: ignore[override]
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
        ctx.save_for_backward(bits)
        ctx.dropped = dropped
        kept, scale = _kept(bits, dropped, x), STEPS / (STEPS - dropped)
        return kept.mul_(x).mul_(scale) if stream is None else torch.addcmul(stream, x, kept, value=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        kept = _kept(ctx.saved_tensors[0], ctx.dropped, up)
        down = kept.mul_(up).mul_(STEPS / (STEPS - ctx.dropped))
        return down, up if ctx.needs_input_grad[1] else None, None


def _kept(bits: Tensor, dropped: int, like: Tensor) -> Tensor:
    """1 where it is kept, 0 elsewhere, in numbers like those."""
    return torch.ge(bits, dropped - STEPS // 2, out=torch.empty_like(bits, dtype=like.dtype))
