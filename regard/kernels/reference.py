"""Attention written out: the definition that every other kernel is tested against."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, Score

from .attention_mask import AttentionMask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    see: AttentionMask,
    score: Score,
    position: Position,
    plain: Tensor,
    drop: float,
    tap: nn.Module,
) -> Tensor:
    heads = q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))  # query head h reads h // group
    scores = score(q, k, see.key_at)  # (batch, heads, n, m)
    bias = position.bias(see.query_at[:, None, :, None], see.key_at[:, None, None, :], plain)
    if bias is not None:
        scores = scores + bias
    allowed = see.full_mask(heads)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = soft(scores)
    weights = tap(weights)
    if drop:
        weights = F.dropout(weights, drop)
    y = weights @ v
    more = position.read(weights, see.query_at[:, None, :, None], see.key_at[:, None, None, :])
    return y if more is None else y + more


def soft(scores: Tensor) -> Tensor:
    """Softmax over the last dimension; a row with nothing to see weighs nothing, instead of NaN."""
    most = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - torch.where(most.isfinite(), most, 0.0))
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
