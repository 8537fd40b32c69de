"""Calls of train.cpp, with tensors in place of pointers: attention and its backward pass, activations, dropout, and
the softmax of logits. The gradients that autograd sees are put together in ops/."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .build import Kernels, threads_for
from .decode import ACTIVATIONS
from .structs import TrainAttentionArgs


def attention(
    name: str,
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    causal: bool,
    scale: float,
    **more: Tensor | None,
) -> None:
    """Call attention_forward or attention_backward. more: the tensors that are read or written, by their names in
    TrainAttentionArgs, the biases of q, k or v (heads * dim) among them."""
    batch, heads, queries, dim = q.shape
    _, groups, keys, _ = k.shape
    hides, steps = False, (0, 0, 0, 0)
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        hides, steps = added.dtype == torch.bool, added.stride()  # type: ignore[assignment]
    args = TrainAttentionArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), added=None if added is None else added.data_ptr(),
        batch=batch, heads=heads, groups=groups, queries=queries, keys=keys, dim=dim, causal=causal, hides=hides,
        threads=min(threads_for(batch * heads * queries * keys * dim), batch * groups), q_step=q.stride()[:3],
        k_step=k.stride()[:3], v_step=v.stride()[:3], added_step=steps, scale=scale,
        **{what: tensor.data_ptr() for what, tensor in more.items() if tensor is not None},
    )  # fmt: skip
    args.room_step = kernels.named["attention_workspace", q.dtype](ctypes.byref(args))
    workspace = q.new_empty(args.threads * args.room_step)
    args.room = workspace.data_ptr()
    kernels.named[name, q.dtype](ctypes.byref(args))


def activation(kernels: Kernels, hidden: Tensor, bias: Tensor | None, activated: Tensor, name: str) -> None:
    """Add a bias to hidden (rows, channels) in place, and write its activation into `activated`."""
    bias = None if bias is None else bias.contiguous()
    at = [None if t is None else t.data_ptr() for t in (hidden, bias, activated)]
    kernels.named["activation", hidden.dtype](*at, *hidden.shape, ACTIVATIONS.index(name), threads_for(hidden.numel()))


def activation_backward(kernels: Kernels, hidden: Tensor, activated: Tensor, dy: Tensor, name: str) -> None:
    """Multiply dy in place by the derivative of the activation at `hidden`, whose activation goes into `activated`."""
    kernels.named["activation_backward", hidden.dtype](
        hidden.data_ptr(), activated.data_ptr(), dy.data_ptr(), hidden.numel(), ACTIVATIONS.index(name),
        threads_for(hidden.numel()),
    )  # fmt: skip


def dropped(x: Tensor, residual: Tensor | None, kernels: Kernels, count: int, scale: float, seed: int) -> Tensor:
    """Return residual + scale * x, where `count` of 65,536 elements of x on average are dropped."""
    y = torch.empty_like(x)
    kernels.named["drop", x.dtype](
        x.data_ptr(), None if residual is None else residual.data_ptr(), y.data_ptr(), x.numel(), count, scale, seed,
        threads_for(x.numel()),
    )  # fmt: skip
    return y


def powers(kernels: Kernels, rows: Tensor, bias: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn rows (n, vocab) of logits times log2(e) into 2^(logit - max) in place, after adding a bias that is not
    scaled. Return the largest logit, the sum, and the logit of the target of each row, (n, 1) each."""
    top, mass, right = rows.new_empty(3, len(rows), 1)
    bias = None if bias is None else bias.contiguous()
    kernels.named["powers", rows.dtype](
        rows.data_ptr(), None if bias is None else bias.data_ptr(), goal.data_ptr(), top.data_ptr(), mass.data_ptr(),
        right.data_ptr(), *rows.shape, threads_for(rows.numel()),
    )  # fmt: skip
    return top, mass, right
