"""Pooling of a sequence into one vector."""

import torch
from torch import Tensor

from regard.core import Context, UserError
from regard.errors import nearest

POOLS = ("first", "last", "mean", "max")


def check_pool(how: str) -> str:
    if how not in POOLS:
        raise UserError(f"unknown pool '{how}'{nearest(how, POOLS)}")
    return how


def pool(x: Tensor, context: Context, how: str) -> Tensor:
    """x (batch, time, width) -> (batch, width), from the real positions alone. A row without any gives
    finite but meaningless numbers."""
    if how == "first":
        return x[:, 0]
    if how == "last":
        rows = torch.arange(x.shape[0], device=x.device)
        return x[rows, (context.lengths - 1).clamp(min=0)]
    if context.valid is None:
        return x.mean(1) if how == "mean" else x.amax(1)
    real = context.valid[..., None]
    if how == "mean":
        return x.masked_fill(~real, 0.0).sum(1) / context.lengths.clamp(min=1)[:, None]
    most = x.masked_fill(~real, float("-inf")).amax(1)
    return torch.where(context.lengths[:, None] > 0, most, 0.0)
