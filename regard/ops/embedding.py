"""Embedding lookup whose gradient is added to the table's accumulation buffer, where there is one, instead of a new
table of zeros."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .accumulate import buffer_for, is_accumulating
from .dispatch import NO_KERNEL, note


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """ids (...), table (rows, dim) -> (..., dim)"""
    note("embedding", NO_KERNEL)
    if not is_accumulating() or not table.requires_grad or not table.is_cpu or not torch.is_grad_enabled():
        return F.embedding(ids, table)
    return _Embedding.apply(ids, table)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(ids, table)
        return F.embedding(ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        ids, table = ctx.saved_tensors
        buffer = buffer_for(table)[1]
        to = torch.zeros_like(table) if buffer is None else buffer
        to.index_add_(0, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        return None, to if buffer is None else None
