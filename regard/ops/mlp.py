"""Two linear layers with an activation between them, which save one hidden vector for the backward pass instead of
two."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.native import train
from regard.native.build import Kernels
from regard.native.decode import ACTIVATIONS as FUSED_ACTIVATIONS
from regard.native.matmul import multiply

from .activation import activation as activation_function
from .dispatch import is_product_faster, kernels_for
from .linear import matmul, weight_gradients


def mlp(
    x: Tensor, weight_in: Tensor, bias_in: Tensor | None, activation: str, weight_out: Tensor, bias_out: Tensor | None
) -> Tensor:
    """x (..., width) -> weight_out activation(weight_in x + bias_in) + bias_out"""
    unless = "" if activation in FUSED_ACTIVATIONS else f"the kernel does not know the activation '{activation}'"
    kernels = kernels_for(x, weight_in, bias_in, weight_out, bias_out, op="mlp", unless=unless)
    if kernels is None:
        return F.linear(activation_function(activation)(F.linear(x, weight_in, bias_in)), weight_out, bias_out)
    return _Mlp.apply(kernels, x, weight_in, bias_in, activation, weight_out, bias_out)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, kernels: Kernels, x: Tensor, weight_in: Tensor, bias_in: Tensor | None, activation: str,
        weight_out: Tensor, bias_out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1])
        hidden, activated = _activated_product(kernels, rows, weight_in.T, bias_in, activation)
        ctx.kernels, ctx.activation = kernels, activation
        ctx.save_for_backward(rows, hidden, weight_in, weight_out)
        return matmul(kernels, activated, weight_out.T, bias_out).view(*x.shape[:-1], weight_out.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        rows, hidden, weight_in, weight_out = ctx.saved_tensors
        grad = dy.reshape(-1, dy.shape[-1])
        grad_hidden, activated = _activation_backward_product(ctx.kernels, grad, weight_out, hidden, ctx.activation)
        wanted = ctx.needs_input_grad
        return (
            None,
            matmul(ctx.kernels, grad_hidden, weight_in).view(*dy.shape[:-1], weight_in.shape[1]) if wanted[1] else None,
            weight_gradients(ctx.kernels, (rows, grad_hidden, weight_in))[0] if wanted[2] else None,
            grad_hidden.sum(0) if wanted[3] else None,
            None,
            weight_gradients(ctx.kernels, (activated, grad, weight_out))[0] if wanted[5] else None,
            grad.sum(0) if wanted[6] else None,
        )


def _activated_product(
    kernels: Kernels, x: Tensor, p: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """Return x p + bias, and its activation; the same tensor twice where the derivative follows from the activation."""
    own = is_product_faster(kernels, len(x), p)
    hidden = x.new_empty(len(x), p.shape[1]) if own else x @ p
    activated = hidden if activation in ("identity", "relu") else torch.empty_like(hidden)
    if own:
        multiply(kernels, x, p, bias, hidden, activation=activation, activated=activated)
    else:
        train.activation(kernels, hidden, bias, activated, activation)
    return hidden, activated


def _activation_backward_product(
    kernels: Kernels, x: Tensor, p: Tensor, hidden: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return x p times the derivative of the activation at `hidden`, and the activation of `hidden`."""
    activated = torch.empty_like(hidden)
    if is_product_faster(kernels, len(x), p):
        return multiply(kernels, x, p, activation=activation, activated=activated, hidden=hidden), activated
    y = matmul(kernels, x, p)
    train.activation_backward(kernels, hidden, activated, y, activation)
    return y, activated
