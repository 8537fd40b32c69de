"""Attention by torch's fused kernel, dense; where that is slow, on a CPU, by kernels of our own for a few queries
and for learning, and by the same products one after the other for few keys."""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Position
from regard.native import train
from regard.native.build import Kernels, inference_kernels, load_kernels, training_kernels
from regard.native.decode import attend as attend_few

from .attention_mask import AttentionMask

SHORT = 32  # keys, up to which the fused kernel does not pay in learning
FEW = 8  # queries, up to which our own kernel pays
LOOK = 64  # keys, up to which torch's does not pay for more queries that learn nothing


def attend(
    q: Tensor, k: Tensor, v: Tensor, see: AttentionMask, position: Position, plain: Tensor, drop: float
) -> Tensor:
    heads = q.shape[1]
    bias = None
    if position.acts("bias"):
        bias = position.bias(see.query_at[:, None, :, None], see.key_at[:, None, None, :], plain)
    grouped = k.shape[1] != heads
    if not drop and q.shape[2] <= FEW and native_for(q, k, v):
        known = load_kernels()
        assert known is not None
        added = see.added(heads, bias, q.dtype)
        return attend_few(known, *map(_side_by_side, (q, k, v)), added, see.row_owner).transpose(1, 2)
    if not drop and _learns(q, k, v) and (known := _kernels_to_learn(q, k, v, bias)):
        added = None if see.causal_only and bias is None else see.added(heads, bias, q.dtype)
        return train.attend(known, *map(_side_by_side, (q, k, v)), added, see.causal_only).transpose(1, 2)
    how = None if drop or grouped else _by_hand(q, k, v)
    if bias is None and see.causal_only:
        if how:
            return how(q, k, v, torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype).triu(1))
        # Padding stands on the right, so that no real query can see it.
        return F.scaled_dot_product_attention(q, k, v, None, drop, is_causal=True, scale=1.0, enable_gqa=grouped)
    mask, sighted = see.mask(heads)
    if mask is None:
        added = bias
    elif bias is None:
        added = mask  # torch answers a row with nothing to see with zeros
    else:
        added = bias.masked_fill(~mask, float("-inf"))
    if added is not None and added.dtype != q.dtype and added.is_floating_point():
        added = added.to(q.dtype)
    if how and sighted:
        return how(q, k, v, added)
    return F.scaled_dot_product_attention(q, k, v, added, drop, scale=1.0, enable_gqa=grouped)


def native_for(*tensors: Tensor) -> bool:
    """Whether our own kernel can take them."""
    return inference_kernels(*tensors) is not None


def _kernels_to_learn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Kernels | None:
    """Those that can: they know values as wide as keys alone, and no way back to a bias."""
    if q.shape[3] != v.shape[3] or len(q) != len(k) or (bias is not None and bias.requires_grad):
        return None
    return training_kernels(q, k, v)


def _learns(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _side_by_side(tensor: Tensor) -> Tensor:
    """With its channels."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _by_hand(q: Tensor, k: Tensor, v: Tensor):
    """The faster way, where there is one."""
    if q.device.type != "cpu" or torch.is_autocast_enabled("cpu") or q.dtype.itemsize <= 2:
        return None  # in half precision, products one after the other lose more than the fused kernel does
    queries, keys = q.shape[2], k.shape[2]
    if _learns(q, k, v):
        return _products if keys <= SHORT else None
    return _products if queries > 1 and keys <= LOOK and k.is_contiguous() and v.is_contiguous() else None


def _products(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> Tensor:
    return _with(q @ k.transpose(2, 3), added).softmax(-1) @ v


def _with(scores: Tensor, added: Tensor | None) -> Tensor:
    if added is None:
        return scores
    return scores.masked_fill(~added, float("-inf")) if added.dtype == torch.bool else scores + added
