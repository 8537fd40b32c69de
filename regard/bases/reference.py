"""Attention written out: the definition that every other kernel is tested against."""

import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, Score
from regard.ops.attention import masked_softmax

from .attention_mask import AttentionMask


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    score: Score,
    position: Position,
    plain: Tensor,
    drop: float,
    tap: nn.Module,
) -> Tensor:
    heads = q.shape[1]
    k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))  # query head h reads h // group
    scores = score(q, k, mask.key_at)  # (batch, heads, n, m)
    bias = position.bias(mask.query_at[:, None, :, None], mask.key_at[:, None, None, :], plain)
    if bias is not None:
        scores = scores + bias
    allowed = mask.full_mask(heads)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    weights = masked_softmax(scores)
    weights = tap(weights)
    if drop:
        weights = F.dropout(weights, drop)
    y = weights @ v
    more = position.output_bias(weights, mask.query_at[:, None, :, None], mask.key_at[:, None, None, :])
    return y if more is None else y + more
