"""Projection, softmax and cross-entropy in one: the scores of all tokens never exist together.

    loss = sum over rows of  (1 - s) (-log p[target]) + s mean over all words of (-log p),     p = softmax(x W^T + b)

Rows are taken some at a time and the gradient is made on the way, so that a batch of 4,096 tokens over 10,000 words
needs no 160 MB of scores, written and read several times over.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 512


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, bias: Tensor | None, target: Tensor, smoothing: float):  # type: ignore[override]
        vocab = table.shape[0]
        wanted = ctx.needs_input_grad
        dx = torch.empty_like(x) if wanted[0] else None
        dtable = torch.zeros_like(table) if wanted[1] else None
        dbias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        loss, nll = x.new_zeros(()), x.new_zeros(())
        for begin in range(0, x.shape[0], ROWS):
            some, goal = x[begin : begin + ROWS], target[begin : begin + ROWS, None]
            logits = some @ table.T if bias is None else torch.addmm(bias, some, table.T)
            total = logits.logsumexp(-1, keepdim=True)
            miss = total - logits.gather(1, goal)
            nll += miss.sum()
            loss += (1 - smoothing) * miss.sum()
            if smoothing:
                loss += smoothing * (total.sum() - logits.sum() / vocab)
            if dx is None and dtable is None:
                continue
            slope = logits.sub_(total).exp_()
            if smoothing:
                slope -= smoothing / vocab
            slope.scatter_add_(1, goal, slope.new_full(goal.shape, smoothing - 1))
            if dx is not None:
                torch.mm(slope, table, out=dx[begin : begin + ROWS])
            if dtable is not None:
                dtable.addmm_(slope.T, some)
            if dbias is not None:
                dbias += slope.sum(0)
        ctx.save_for_backward(dx, dtable, dbias)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx, up: Tensor, _: Tensor):  # type: ignore[override]
        return *(None if g is None else g * up for g in ctx.saved_tensors), None, None


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
