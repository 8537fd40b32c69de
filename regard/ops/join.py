"""Attention computed over parts of the keys and merged by log-sum-exp, as if it had been over all keys at once.

    y = sum of share_i y_i        share_i = exp(total_i) / sum of exp(total_j)        total_i = log sum of exp(scores_i)

A key in several parts counts several times. Milakov & Gimelshein 2018, "Online normalizer calculation for
softmax", arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PartialAttention(NamedTuple):
    """Attention over some of the keys."""

    y: Tensor  # (batch, heads, n, dim)
    logsumexp: Tensor  # (batch, heads, n) of the scores, -inf where there were no keys


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, bias: Tensor | None, drop: float
) -> PartialAttention:
    """Attend to the keys k and v (batch, kv_heads, m, dim); hidden: True where masked, broadcasts to (batch, heads, n,
    m)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
    scores = (scores if bias is None else scores + bias).masked_fill(hidden, float("-inf"))
    most = scores.amax(-1, keepdim=True).detach()
    most = torch.where(most.isfinite(), most, 0.0)
    weights = torch.exp(scores - most)
    whole = weights.sum(-1, keepdim=True)
    floor = torch.finfo(whole.dtype).tiny
    weights = weights / whole.clamp(min=floor)
    total = torch.where(whole > 0, whole.clamp(min=floor).log() + most, float("-inf")).squeeze(-1)
    return PartialAttention(F.dropout(weights, drop).to(v.dtype) @ v if drop else weights.to(v.dtype) @ v, total)


def merge(parts: Sequence[PartialAttention], learned: bool = True) -> PartialAttention:
    """Merge partial attentions into one. With `learned` False, the shares get no gradient."""
    if len(parts) == 1:
        return parts[0]
    totals = torch.stack([part.logsumexp for part in parts])
    totals = totals if learned else totals.detach()
    most = totals.amax(0).detach()
    most = torch.where(most.isfinite(), most, 0.0)
    weights = torch.exp(totals - most)  # (parts, batch, heads, n)
    whole = weights.sum(0)
    floor = torch.finfo(whole.dtype).tiny
    shares = (weights / whole.clamp(min=floor))[..., None]
    y = sum((share.to(part.y.dtype) * part.y for share, part in zip(shares, parts, strict=True)), start=0.0)
    seen = torch.where(whole > 0, whole.clamp(min=floor).log() + most, float("-inf"))
    assert isinstance(y, Tensor)
    return PartialAttention(y, seen)
