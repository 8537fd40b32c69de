"""Attention of all queries to all keys that a pattern allows, by the op that takes a mask."""

from torch import Tensor

from regard.core import Position
from regard.ops.attention import attention

from .attention_mask import AttentionMask


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, position: Position, plain: Tensor, dropout: float
) -> Tensor:
    bias = None
    if position.acts("bias"):
        bias = position.bias(mask.query_at[:, None, :, None], mask.key_at[:, None, None, :], plain)
    heads = q.shape[1]
    if bias is None and mask.causal_only:  # padding stands on the right, so that no real query can see it
        return attention(q, k, v, causal=True, dropout=dropout, row_owner=mask.row_owner)
    added = mask.as_attn_mask(heads, bias, q.dtype)
    return attention(q, k, v, added, dropout=dropout, row_owner=mask.row_owner, no_empty_rows=mask.mask(heads)[1])
