"""Fused output projection, softmax and cross-entropy: the logits of all tokens never exist together.

    loss = sum over rows of  (1 - s) (-log p[target]) + s mean over the vocabulary of (-log p)
    p    = softmax(x W^T + b)

Rows are processed in chunks and the gradient is computed with the loss, so that a batch of 4,096 tokens over a
vocabulary of 10,000 needs no 160 MB of logits, written and read several times. `log_partition` is for losses that need
the log-probabilities of several tokens at a position: log p[y] = x W[y]^T + b[y] - log_partition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.native import private, train
from regard.native.build import Kernels
from regard.native.matmul import multiply, pack_matrix

from .accumulate import buffer_for
from .dispatch import is_product_faster, kernels_for
from .linear import matmul_into

MAX_ROWS = 300  # of a chunk
TILE = 12  # the rows of a chunk are a multiple of this, for our own matrix products
BUFFER_ROWS = 60  # the buffer's rows are a multiple of this, so that the allocator can reuse its memory
LOG2_E = 1 / math.log(2)  # exp(x) = exp2(x * LOG2_E)


class _FusedCrossEntropy(torch.autograd.Function):
    """With e = exp(logits - max) and m its sum over the vocabulary, p = e / m. The narrow factor of each product is
    divided by m, and the part of the gradient besides p is added once, at the end:

        dx = (e W) / m - (1 - s) W[target] - s/vocab sum of W's rows        dW = e^T (x / m) - the same for x

    Logits are multiplied by log2(e), since exp2 is twice as fast as exp.
    """

    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, bias: Tensor | None, target: Tensor, smoothing: float):  # type: ignore[override]
        vocab = table.shape[0]
        wanted = ctx.needs_input_grad
        dx = x.new_empty(x.shape) if wanted[0] else None
        ctx.loss_scale, accumulated = buffer_for(table) if wanted[1] else (1.0, None)
        ctx.is_accumulated = accumulated is not None
        new_like = torch.empty_like if len(x) else torch.zeros_like  # the first chunk overwrites it
        dtable = accumulated if accumulated is not None else new_like(table) if wanted[1] else None
        dbias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        nll, rights = x.new_zeros(()), x.new_zeros(())  # in base 2
        rows = _round_up(-(-len(x) // max(-(-len(x) // MAX_ROWS), 1)), TILE)  # about equal chunks
        buffer = x.new_empty(_round_up(min(rows, len(x)), BUFFER_ROWS), vocab)
        kernels = kernels_for(x, table)
        own = kernels if kernels is not None and is_product_faster(kernels, len(x), table) else None
        score = _right_multiply(own, table.T)
        back = _right_multiply(own, table) if wanted[0] else None
        for begin in range(0, len(x), rows):
            some, goal = x[begin : begin + rows], target[begin : begin + rows, None]
            logits = score(some * LOG2_E, buffer[: len(some)])
            e, top, mass, right = _exponentials(logits, bias, goal)
            nll += (top + mass.log2() - right).sum()
            rights += right.sum()
            if dx is not None and back is not None:
                back(e, dx[begin : begin + rows]).div_(mass)
            if dtable is not None:
                matmul_into(kernels, e.T, some * (ctx.loss_scale / mass), dtable, ctx.is_accumulated or begin > 0)
            if dbias is not None:
                dbias.addmv_(e.T, 1 / mass[:, 0])
        if dx is not None:
            dx.sub_(table[target], alpha=1 - smoothing)
        if dx is not None and smoothing:
            dx.sub_(table.sum(0), alpha=smoothing / vocab)
        if dtable is not None:
            dtable.index_add_(0, target, x, alpha=ctx.loss_scale * (smoothing - 1))
        if dtable is not None and smoothing:
            dtable.sub_(x.sum(0), alpha=ctx.loss_scale * smoothing / vocab)
        if dbias is not None:
            dbias.index_add_(0, target, dbias.new_ones(len(target)), alpha=smoothing - 1)
            dbias.sub_(len(target) * smoothing / vocab)
        loss, nll = nll / LOG2_E, nll / LOG2_E
        if smoothing:
            means = x.sum(0) @ table.mean(0) + (0 if bias is None else len(x) * bias.mean())  # over the vocabulary
            loss = loss + smoothing * (rights / LOG2_E - means)
        ctx.save_for_backward(dx, None if ctx.is_accumulated else dtable, dbias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[override]
        if ctx.is_accumulated and math.isfinite(grad) and abs(float(grad) / ctx.loss_scale - 1) > 1e-5:
            raise RuntimeError(f"the loss was expected to be multiplied by {ctx.loss_scale}, but was by {float(grad)}")
        again = private.keeps_graph()  # the saved gradients may be needed again
        scale = torch.mul if again else Tensor.mul_
        return *(None if g is None else scale(g, grad) for g in ctx.saved_tensors), None, None


class _LogPartition(torch.autograd.Function):
    """As above, for gradients that are known only in the backward pass, which computes e and m again:

    dx = g (e W) / m        dW = e^T (g x / m)        for a gradient g of each row
    """

    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, bias: Tensor | None):  # type: ignore[override]
        ctx.save_for_backward(x, table, bias)
        logs = x.new_empty(len(x))
        for rows, _, top, mass in _chunks(x, table, bias):
            logs[rows] = ((top + mass.log2()) / LOG2_E)[:, 0]
        return logs

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        x, table, bias = ctx.saved_tensors
        dx, dtable = torch.empty_like(x), torch.zeros_like(table)
        dbias = None if bias is None else torch.zeros_like(bias)
        for rows, e, _, mass in _chunks(x, table, bias):
            share = grad[rows, None] / mass
            torch.mm(e, table, out=dx[rows]).mul_(share)
            dtable.addmm_(e.T, x[rows] * share)
            if dbias is not None:
                dbias.addmv_(e.T, share[:, 0])
        return dx, dtable, dbias


def _chunks(x: Tensor, table: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield chunks of rows with their e, in a buffer that the next chunk overwrites, the largest logit and m."""
    buffer = x.new_empty(min(MAX_ROWS, len(x)), table.shape[0])
    first_token = torch.zeros(MAX_ROWS, 1, dtype=torch.long, device=x.device)
    for begin in range(0, len(x), MAX_ROWS):
        rows = slice(begin, min(begin + MAX_ROWS, len(x)))
        logits = torch.mm(x[rows] * LOG2_E, table.T, out=buffer[: rows.stop - begin])
        e, top, mass, _ = _exponentials(logits, bias, first_token[: len(logits)])
        yield rows, e, top, mass


def log_partition(x: Tensor, table: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., width), table (vocab, width) -> (...), the log of the sum over the vocabulary of exp(x W^T + b)."""
    return _LogPartition.apply(x.reshape(-1, x.shape[-1]), table, bias).view(x.shape[:-1])


def _round_up(rows: int, step: int) -> int:
    """Round up to a multiple of `step`, at least one."""
    return max(-(-rows // step), 1) * step


def _right_multiply(own: Kernels | None, p: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (x, out) that writes x p into out; for our own products, p is packed once."""
    if own is None:
        return lambda x, to: torch.mm(x, p, out=to)
    packed = pack_matrix(own, p)
    return lambda x, to: multiply(own, x, packed, to=to)


def _exponentials(logits: Tensor, bias: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return e, in place of the logits, the largest logit, m, and the logit of the target, (rows, 1) each."""
    kernels = kernels_for(logits, bias, op="cross-entropy")
    if kernels is not None:
        return logits, *train.powers(kernels, logits, bias, goal.contiguous())
    if bias is not None:
        logits += bias * LOG2_E
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
    return _FusedCrossEntropy.apply(x, table, bias, target, smoothing)
