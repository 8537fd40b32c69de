"""Attention by torch's fused kernel, dense."""

import torch.nn.functional as F
from torch import Tensor

from regard.core import Position

from .see import See


def attend(q: Tensor, k: Tensor, v: Tensor, see: See, position: Position, plain: Tensor, drop: float) -> Tensor:
    heads = q.shape[1]
    bias = position.bias(see.query_at[:, None, :, None], see.key_at[:, None, None, :], plain)
    grouped = k.shape[1] != heads
    if bias is None and see.causal_only:
        # Padding stands on the right, so that no real query can see it.
        return F.scaled_dot_product_attention(q, k, v, None, drop, is_causal=True, scale=1.0, enable_gqa=grouped)
    mask = see.mask(heads)
    if mask is not None and mask.device.type == "cpu" and bool(mask.all()):
        mask = None  # a mask that hides nothing still costs; asking another device would cost more
    if mask is None:
        added = bias
    elif bias is None:
        added = mask  # torch answers a row with nothing to see with zeros
    else:
        added = bias.masked_fill(~mask, float("-inf"))
    if added is not None and added.dtype != q.dtype and added.is_floating_point():
        added = added.to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, added, drop, scale=1.0, enable_gqa=grouped)
