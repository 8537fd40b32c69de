"""Projection, softmax and cross-entropy in one: the scores of all tokens never exist together.

    loss = sum over rows of  (1 - s) (-log p[target]) + s mean over all words of (-log p),     p = softmax(x W^T + b)

Rows are taken some at a time and the gradient is made on the way, so that a batch of 4,096 tokens over 10,000 words
needs no 160 MB of scores, written and read several times over.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.native import private, train
from regard.native.build import Kernels
from regard.native.matmul import multiply, pack_matrix

from .accumulate import buffer_for
from .dispatch import is_product_faster, kernels_for
from .linear import product_into

ROWS = 300  # at a time, at the most
TILE = 12  # rows of which they are whole multiples, as our own products want it
SOME = 60  # rows that room is made for at least: memory of sizes that come again is used again
BITS = 1 / math.log(2)  # of one e-fold


class _Fused(torch.autograd.Function):
    """With e = exp(logits - their largest) and m its sum over the words, p = e / m. The division is made on the narrow
    side of the products, and the gradient's part that is not p is added at the end, once:

        dx = (e W) / m - (1 - s) W[target] - s/vocab sum of W's rows        dW = e^T (x / m) - the same for x

    Logits are counted in bits, since powers of 2 are made twice as fast as those of e.
    """

    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, bias: Tensor | None, target: Tensor, smoothing: float):  # type: ignore[override]
        vocab = table.shape[0]
        wanted = ctx.needs_input_grad
        dx = x.new_empty(x.shape) if wanted[0] else None
        ctx.share, there = buffer_for(table) if wanted[1] else (1.0, None)
        ctx.added = there is not None
        from_start = torch.empty_like if len(x) else torch.zeros_like  # the first rows are not added to anything
        dtable = there if there is not None else from_start(table) if wanted[1] else None
        dbias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        nll, rights = x.new_zeros(()), x.new_zeros(())  # in bits
        rows = _up(-(-len(x) // max(-(-len(x) // ROWS), 1)), TILE)  # in pieces that are about alike
        room = x.new_empty(_up(min(rows, len(x)), SOME), vocab)
        kernels = kernels_for(x, table)
        own = kernels if kernels is not None and is_product_faster(kernels, len(x), table) else None
        score = _times(own, table.T)
        back = _times(own, table) if wanted[0] else None
        for begin in range(0, len(x), rows):
            some, goal = x[begin : begin + rows], target[begin : begin + rows, None]
            logits = score(some * BITS, room[: len(some)])
            e, top, mass, right = _powers(logits, bias, goal)
            nll += (top + mass.log2() - right).sum()
            rights += right.sum()
            if dx is not None and back is not None:
                back(e, dx[begin : begin + rows]).div_(mass)
            if dtable is not None:
                product_into(kernels, e.T, some * (ctx.share / mass), dtable, ctx.added or begin > 0)
            if dbias is not None:
                dbias.addmv_(e.T, 1 / mass[:, 0])
        if dx is not None:
            dx.sub_(table[target], alpha=1 - smoothing)
        if dx is not None and smoothing:
            dx.sub_(table.sum(0), alpha=smoothing / vocab)
        if dtable is not None:
            dtable.index_add_(0, target, x, alpha=ctx.share * (smoothing - 1))
        if dtable is not None and smoothing:
            dtable.sub_(x.sum(0), alpha=ctx.share * smoothing / vocab)
        if dbias is not None:
            dbias.index_add_(0, target, dbias.new_ones(len(target)), alpha=smoothing - 1)
            dbias.sub_(len(target) * smoothing / vocab)
        loss, nll = nll / BITS, nll / BITS
        if smoothing:
            means = x.sum(0) @ table.mean(0) + (0 if bias is None else len(x) * bias.mean())  # over the words
            loss = loss + smoothing * (rights / BITS - means)
        ctx.save_for_backward(dx, None if ctx.added else dtable, dbias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, up: Tensor, _: Tensor):  # type: ignore[override]
        if ctx.added and math.isfinite(up) and abs(float(up) / ctx.share - 1) > 1e-5:
            raise RuntimeError(f"the loss was to be multiplied by {ctx.share}, and was by {float(up)}")
        again = private.keeps_graph()  # they may be asked for once more
        scale = torch.mul if again else Tensor.mul_
        return *(None if g is None else scale(g, up) for g in ctx.saved_tensors), None, None


def _up(rows: int, step: int) -> int:
    """To whole steps, and one at the least."""
    return max(-(-rows // step), 1) * step


def _times(own: Kernels | None, p: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """x, to -> x p, there: by products of our own p is laid out once for all rows."""
    if own is None:
        return lambda x, to: torch.mm(x, p, out=to)
    laid = pack_matrix(own, p)
    return lambda x, to: multiply(own, x, laid, to=to)


def _powers(logits: Tensor, bias: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """e, in place of the logits, the largest logit, m, and the logit of the goal (rows, 1)."""
    kernels = kernels_for(logits, bias, op="cross-entropy")
    if kernels is not None:
        return logits, *train.powers(kernels, logits, bias, goal.contiguous())
    if bias is not None:
        logits += bias * BITS
    right = logits.gather(1, goal)
    top = logits.amax(1, keepdim=True)
    e = logits.sub_(top).exp2_()
    return e, top, e.sum(1, keepdim=True), right


def cross_entropy(
    x: Tensor, table: Tensor, bias: Tensor | None, target: Tensor, smoothing: float = 0.0, ignore: int = -100
) -> tuple[Tensor, Tensor]:
    """x (..., width), table (vocab, width), target (...) -> the summed loss, and the summed -log p without smoothing.
    Targets equal to `ignore` do not count."""
    x, target = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    keep = target != ignore
    if not bool(keep.all()):
        x, target = x[keep], target[keep]
    return _Fused.apply(x, table, bias, target, smoothing)
