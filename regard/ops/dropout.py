"""Dropout, alone or added to a residual. On a CPU most of its time goes into random numbers, so there 16 random bits
decide about each element, and the kernel saves a seed instead of a mask.

    y = x / (1 - p) where x is kept, 0 elsewhere        residual + y in one pass
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.native.build import Kernels
from regard.native.train import dropped

from .dispatch import kernels_for, note

STEPS = 1 << 16  # 16 random bits decide, four times in one draw: on a CPU, p is a whole number of 65536ths


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x of any shape, each element dropped with probability p."""
    if _is_cheaper(x, p):
        return _drop(x, None, p)
    note("dropout", "our dropout is for CPUs, not for compiled graphs, and not for p = 0 or 1")
    return F.dropout(x, p)


def dropout_add(residual: Tensor, x: Tensor, p: float) -> Tensor:
    """residual + dropout(x, p)"""
    if not _is_cheaper(x, p) or residual.dtype != x.dtype or residual.shape != x.shape:
        return residual + dropout(x, p)
    return _drop(x, residual, p)


def _is_cheaper(x: Tensor, p: float) -> bool:
    return 0 < p < 1 and x.device.type == "cpu" and not torch.compiler.is_compiling()


def _drop(x: Tensor, residual: Tensor | None, p: float) -> Tensor:
    count = min(round(p * STEPS), STEPS - 1)
    kernels = kernels_for(x, residual, op="dropout")
    if kernels is None:
        return _DroppedByMask.apply(x, residual, count)
    return _DroppedBySeed.apply(kernels, x, residual, count, STEPS / (STEPS - count))


class _DroppedBySeed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, residual: Tensor | None, count: int, scale: float):  # type: ignore[override]
        ctx.args = kernels, count, scale, int(torch.empty((), dtype=torch.int64).random_())
        return dropped(x.contiguous(), None if residual is None else residual.contiguous(), *ctx.args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        return None, dropped(dy.contiguous(), None, *ctx.args), dy if ctx.needs_input_grad[2] else None, None, None


class _DroppedByMask(torch.autograd.Function):
    """Saves the random bits for the backward pass, two bytes for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, count: int) -> Tensor:  # type: ignore[override]
        draws = torch.empty((x.numel() + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
        bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
        ctx.save_for_backward(bits)
        ctx.count = count
        kept, scale = _kept(bits, count, x), STEPS / (STEPS - count)
        return kept.mul_(x).mul_(scale) if residual is None else torch.addcmul(residual, x, kept, value=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        kept = _kept(ctx.saved_tensors[0], ctx.count, dy)
        down = kept.mul_(dy).mul_(STEPS / (STEPS - ctx.count))
        return down, dy if ctx.needs_input_grad[1] else None, None


def _kept(bits: Tensor, count: int, like: Tensor) -> Tensor:
    """Return 1 where an element is kept and 0 elsewhere, in the dtype of `like`."""
    return torch.ge(bits, count - STEPS // 2, out=torch.empty_like(bits, dtype=like.dtype))
