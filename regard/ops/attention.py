"""Softmax attention by the fastest implementation for the given tensors, and the same with its four projections.

    attention             softmax(q k^T + attn_mask) v
    projected_attention   the same between the projections to q, k, v and the last one, in one pass with its gradient

bases/attend.py computes the masks and biases from patterns and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.native import decode, train
from regard.native.build import Kernels
from regard.native.structs import ADDS

from .dispatch import FEW_QUERIES, kernels_for
from .linear import matmul, matmul_into, weight_gradients

MANY_QUERIES = f"torch's kernel is faster for more than {FEW_QUERIES} queries without gradients"
SHORT_KEYS = 32  # up to which torch's fused kernel is slower in training than matmul, softmax, matmul
SHORT_KEYS_INFERENCE = 64  # the same for several queries without gradients


def masked_softmax(logits: Tensor) -> Tensor:
    """Return the softmax over the last dimension; a row of only -inf gives zeros instead of NaN."""
    largest = logits.amax(-1, keepdim=True).detach()
    weights = torch.exp(logits - torch.where(largest.isfinite(), largest, 0.0))
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).tiny)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    row_owner: Tensor | None = None,
    no_empty_rows: bool = False,
) -> Tensor:
    """Return softmax(q k^T + attn_mask) v, (batch, heads, n, dim), for q (batch, heads, n, dim) that is scaled already,
    k and v (batch, kv_heads, m, dim). A query with nothing to attend to gets zeros.

    attn_mask: bool, True where a query may attend, or a float that is added to the logits; broadcasts to
               (batch, heads, n, m).
    causal:    the i-th query attends to the first i + 1 keys; then there is no attn_mask.
    row_owner: (batch, m or more) the row of k and v that holds each key; None: each row its own.
    no_empty_rows: whether every query is known to attend to something.
    """
    queries, keys, grouped = q.shape[2], k.shape[2], k.shape[1] != q.shape[1]
    needs_grad = _needs_grad(q, k, v)
    unless = _why_not_supported(q, k, v, attn_mask, dropout, needs_grad)
    kernels = kernels_for(q, k, v, op="attention", unless=unless)
    if kernels is not None and not needs_grad:
        if causal:
            attn_mask = torch.ones(queries, keys, dtype=torch.bool).tril()
        q, k, v = map(_channels_contiguous, (q, k, v))
        return decode.attend(kernels, q, k, v, attn_mask, row_owner).transpose(1, 2)
    if kernels is not None:
        return _Attend.apply(kernels, *map(_channels_contiguous, (q, k, v)), attn_mask, causal).transpose(1, 2)
    if not dropout and not grouped and _is_matmul_faster(q, k, v) and (causal or no_empty_rows):
        if causal:
            attn_mask = torch.full((queries, keys), float("-inf"), dtype=q.dtype).triu(1)
        return _matmul_attention(q, k, v, attn_mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, is_causal=causal, scale=1.0, enable_gqa=grouped)


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
    logits = q @ k.transpose(2, 3)
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1) @ v


def _why_not_supported(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout: float, needs_grad: bool
) -> str:
    """Return why our kernels do not compute this attention; an empty string where they do."""
    if dropout:
        return "attention weights are dropped out, and the kernel has no dropout"
    if not needs_grad:
        return "" if q.shape[2] <= FEW_QUERIES else MANY_QUERIES
    if attn_mask is not None and attn_mask.requires_grad:
        return "the position's bias learns, and the kernel has no gradient of it"
    if q.shape[3] != v.shape[3]:
        return "values are not as wide as keys"
    return "" if len(q) == len(k) else "rows share keys, and the kernel has no gradient of that"


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _channels_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _is_matmul_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether three operations are faster on a CPU than torch's fused kernel."""
    if q.device.type != "cpu" or torch.is_autocast_enabled("cpu") or q.dtype.itemsize <= 2:
        return False  # in half precision, separate products are less exact than the fused kernel
    queries, keys = q.shape[2], k.shape[2]
    if _needs_grad(q, k, v):
        return keys <= SHORT_KEYS
    return queries > 1 and keys <= SHORT_KEYS_INFERENCE and k.is_contiguous() and v.is_contiguous()


class _Attend(torch.autograd.Function):
    """Saves no weights: the backward pass computes them again from q and k."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, causal: bool):  # type: ignore[override]
        batch, heads, queries, dim = q.shape
        y, mass = q.new_empty(batch, queries, heads, dim), q.new_empty(batch, heads, 2, queries)
        ctx.kernels, ctx.causal = kernels, causal
        ctx.save_for_backward(q, k, v, attn_mask, y, mass)
        train.attention("attention_forward", kernels, q, k, v, attn_mask, causal, 1.0, y=y, mass=mass)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        q, k, v, attn_mask, y, mass = ctx.saved_tensors
        dq = torch.empty_like(y)
        dk, dv = (q.new_empty(k.shape[0], k.shape[2], k.shape[1], k.shape[3]) for _ in range(2))
        more = {"y": y, "mass": mass, "dy": dy.contiguous(), "dq": dq, "dk": dk, "dv": dv}
        train.attention("attention_backward", ctx.kernels, q, k, v, attn_mask, ctx.causal, 1.0, **more)
        return None, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None


def projected_attention(
    x: Tensor, memory: Tensor | None, projections: Sequence[Tensor | None], heads: tuple[int, int],
    scale: float, attn_mask: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    """x (batch, n, width) -> (batch, n, width): projections to q, k and v, attention, and the output projection, for
    tensors that the kernels take (dispatch.why_no_kernels).

    memory:      (batch, m, width) the source of keys and values; None: x.
    projections: weight and bias of each of the four.
    heads:       numbers of query heads and of key heads.
    """
    kernels = kernels_for(x, memory, *projections)
    return _ProjectedAttention.apply(kernels, x, memory, heads, scale, attn_mask, causal, *projections)


class _ProjectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, kernels: Kernels, x: Tensor, memory: Tensor | None, heads: tuple[int, int], scale: float,
        attn_mask: Tensor | None, causal: bool, *projections: Tensor | None,
    ) -> Tensor:  # fmt: skip
        weights, biases = [m for m in projections[::2] if m is not None], projections[1::2]
        into = [(weight.T, bias) for weight, bias in zip(weights, biases, strict=True)]
        rows = x.reshape(-1, x.shape[-1])
        source = None if memory is None else memory.reshape(-1, memory.shape[-1])
        source_rows = rows if source is None else source
        q, k, v = (
            matmul(kernels, one, weight)
            for one, (weight, _) in zip((rows, source_rows, source_rows), into[:3], strict=True)
        )
        head_counts = (heads[0], heads[1], heads[1])
        q, k, v = (
            t.view(len(x), -1, h, t.shape[1] // h).transpose(1, 2) for t, h in zip((q, k, v), head_counts, strict=True)
        )
        batch, _, queries, dim = q.shape
        y, mass = x.new_empty(batch, queries, heads[0] * dim), x.new_empty(batch, heads[0], 2, queries)
        adds = [
            None if bias is None else bias.contiguous() for bias in biases[:3]
        ]  # added by the kernel as it reads q, k and v
        more = {"y": y, "mass": mass, **dict(zip(ADDS, adds, strict=True))}
        train.attention("attention_forward", kernels, q, k, v, attn_mask, causal, scale, **more)
        ctx.args = kernels, scale, causal
        ctx.save_for_backward(rows, source, q, k, v, attn_mask, y, mass, *weights, *adds)
        return matmul(kernels, y.view(-1, y.shape[-1]), *into[3]).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        rows, source, q, k, v, attn_mask, y, mass, *saved = ctx.saved_tensors
        weights, adds = saved[:4], dict(zip(ADDS, saved[4:], strict=True))
        kernels, scale, causal = ctx.args
        wanted, is_cross = ctx.needs_input_grad, source is not None
        grad = dy.reshape(-1, dy.shape[-1])
        dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1] * t.shape[3]) for t in (q, k, v))
        more = {"y": y, "mass": mass, "dy": matmul(kernels, grad, weights[3]), "dq": dq, "dk": dk, "dv": dv}
        train.attention("attention_backward", kernels, q, k, v, attn_mask, causal, scale, **more, **adds)
        grads_out = [*(d.view(-1, d.shape[-1]) for d in (dq, dk, dv)), grad]
        dx = matmul(kernels, grads_out[0], weights[0]) if wanted[1] else None
        dmemory = matmul(kernels, grads_out[1], weights[1]) if is_cross and wanted[2] else None
        for to, i in ((dmemory, 2),) if is_cross else ((dx, 1), (dx, 2)):
            if to is not None:
                matmul_into(kernels, grads_out[i], weights[i], to, True)
        source_rows = source if is_cross else rows
        asked = [*zip((rows, source_rows, source_rows, y.view(-1, y.shape[-1])), grads_out, weights, strict=True)]
        learning = [i for i in range(4) if wanted[7 + 2 * i]]
        grads = dict(zip(learning, weight_gradients(kernels, *(asked[i] for i in learning)), strict=True))
        each = [(grads.get(i), grads_out[i].sum(0) if wanted[8 + 2 * i] else None) for i in range(4)]
        back = (None if d is None else d.view(len(q), -1, d.shape[1]) for d in (dx, dmemory))
        return None, *back, None, None, None, None, *(grad for pair in each for grad in pair)
