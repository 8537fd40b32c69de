"""Attention by torch's fused kernel, dense; where that is slow, which is in learning short sequences on a CPU, by the
same products one after the other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Position

from .see import See

SHORT = 32  # keys, up to which the fused kernel does not pay


def attend(q: Tensor, k: Tensor, v: Tensor, see: See, position: Position, plain: Tensor, drop: float) -> Tensor:
    heads = q.shape[1]
    bias = position.bias(see.query_at[:, None, :, None], see.key_at[:, None, None, :], plain)
    grouped = k.shape[1] != heads
    short = k.shape[2] <= SHORT and not (drop or grouped) and _learns_on_cpu(q, k, v)
    if bias is None and see.causal_only:
        if short:
            ahead = torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype).triu(1)
            return (q @ k.transpose(2, 3) + ahead).softmax(-1) @ v
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
    if short and (mask is None or bool(mask.any(-1).all())):
        scores = q @ k.transpose(2, 3)
        if added is not None:
            scores = scores.masked_fill(~added, float("-inf")) if added.dtype == torch.bool else scores + added
        return scores.softmax(-1) @ v
    return F.scaled_dot_product_attention(q, k, v, added, drop, scale=1.0, enable_gqa=grouped)


def _learns_on_cpu(*tensors: Tensor) -> bool:
    """In full precision; in half of it, products one after the other lose more than the fused kernel does."""
    full = tensors[0].device.type == "cpu" and not torch.is_autocast_enabled("cpu") and tensors[0].dtype.itemsize > 2
    return full and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
