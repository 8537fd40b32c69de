"""Linear layers and matrix products for other ops: torch's, or our own where they are faster."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.native.build import Kernels
from regard.native.decode import apply, linear_params
from regard.native.matmul import PackedMatrix, multiply, pack_matrix

from .accumulate import buffer_for
from .dispatch import inference_kernels, is_contiguous, is_few_rows, is_product_faster, product_kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in), bias (out,) -> x weight^T + bias, (..., out)."""
    if is_few_rows(x):
        unless = "" if is_contiguous(weight, bias) else "the weights are not contiguous"
        kernels = inference_kernels(x, weight, bias, op="linear", unless=unless)
        if kernels is None:
            return F.linear(x, weight, bias)
        return apply(kernels, linear_params(weight, bias), flatten_rows(x)).view(*x.shape[:-1], weight.shape[0])
    kernels = product_kernels("linear", x.numel() // max(x.shape[-1], 1), weight, x, weight, bias)
    if kernels is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(kernels, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        rows = x.reshape(-1, x.shape[-1])
        ctx.kernels = kernels
        ctx.save_for_backward(rows, weight)
        return matmul(kernels, rows, weight.T, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        (rows, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        grad = dy.reshape(-1, dy.shape[-1])
        return (
            None,
            matmul(ctx.kernels, grad, weight).view(*dy.shape[:-1], weight.shape[1]) if wanted[1] else None,
            weight_gradients(ctx.kernels, (rows, grad, weight))[0] if wanted[2] else None,
            grad.sum(0) if wanted[3] else None,
        )


def flatten_rows(x: Tensor) -> Tensor:
    """Return x (..., width) as contiguous rows (rows, width)."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def matmul(kernels: Kernels, x: Tensor, p: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x (rows, in) p (in, out) + bias."""
    if is_product_faster(kernels, len(x), p):
        return multiply(kernels, x, p, bias)
    return x @ p if bias is None else torch.addmm(bias, x, p)


def matmul_into(
    kernels: Kernels | None, x: Tensor, p: Tensor, out: Tensor, accumulate: bool, packed: PackedMatrix | None = None
) -> Tensor:
    """Write x p into `out`, or add it. packed: p, where it is packed already."""
    if kernels is not None and is_product_faster(kernels, len(p), out) and out.stride(1) == 1:
        return multiply(kernels, x, packed or p, to=out, adds=accumulate)
    return out.addmm_(x, p, beta=int(accumulate))


def weight_gradients(kernels: Kernels, *requests: tuple[Tensor, Tensor, Tensor]) -> list[Tensor | None]:
    """Return grad^T x, the gradient of a weight (out, in), for each (x, grad, weight); None where it was added to its
    accumulation buffer. An x that occurs several times is packed once."""
    grads: list[Tensor | None] = []
    uses, packed = Counter(id(x) for x, _, _ in requests), dict[int, PackedMatrix]()
    for x, grad, weight in requests:
        if uses[id(x)] > 1 and id(x) not in packed and is_product_faster(kernels, len(x), weight):
            packed[id(x)] = pack_matrix(kernels, x)
        buffer = buffer_for(weight)[1]
        out = grad.new_empty(weight.shape) if buffer is None else buffer
        made = matmul_into(kernels, grad.T, x, out, buffer is not None, packed.get(id(x)))
        grads.append(made if buffer is None else None)
    return grads
