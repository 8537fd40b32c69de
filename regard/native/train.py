"""Learning on a CPU with kernels of our own, train.cpp: the same as torch's operations and their gradients, with
less memory to write and to read again.

Attention keeps no weights, feed-forwards keep one vector of hidden channels and not two, and dropout keeps a number.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .build import Kernels, threads_for
from .matmul import (
    PackedMatrix,
    activated_product,
    activation_backward_product,
    pack_matrix,
    pays,
    product,
    product_into,
)
from .structs import ADDS, TrainAttentionArgs


def attend(known: Kernels, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool = False) -> Tensor:
    """As native.attend has it, for any number of queries; causal: the i-th query looks at the first i keys besides its
    own. Nothing is learned of what is added."""
    return _Attend.apply(known, q, k, v, added, causal)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, known: Kernels, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool):  # type: ignore[override]
        batch, heads, queries, dim = q.shape
        y, mass = q.new_empty(batch, queries, heads, dim), q.new_empty(batch, heads, 2, queries)
        ctx.known, ctx.causal = known, causal
        ctx.save_for_backward(q, k, v, added, y, mass)
        _call_attention("attention_forward", known, q, k, v, added, causal, 1.0, y=y, mass=mass)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        q, k, v, added, y, mass = ctx.saved_tensors
        dq = torch.empty_like(y)
        dk, dv = (q.new_empty(k.shape[0], k.shape[2], k.shape[1], k.shape[3]) for _ in range(2))
        more = {"y": y, "mass": mass, "dy": dy.contiguous(), "dq": dq, "dk": dk, "dv": dv}
        _call_attention("attention_backward", ctx.known, q, k, v, added, ctx.causal, 1.0, **more)
        return None, dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), None, None


def _call_attention(
    name: str,
    known: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    added: Tensor | None,
    causal: bool,
    scale: float,
    **more: Tensor | None,
) -> None:
    """more: where it is read or put; what is added to all q, k or v (heads * dim)."""
    batch, heads, queries, dim = q.shape
    _, groups, keys, _ = k.shape
    hides, steps = False, (0, 0, 0, 0)
    if added is not None:
        added = added.expand(batch, heads, queries, keys)
        hides, steps = added.dtype == torch.bool, added.stride()  # type: ignore[assignment]
    seen = TrainAttentionArgs(
        q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), added=None if added is None else added.data_ptr(),
        batch=batch, heads=heads, groups=groups, queries=queries, keys=keys, dim=dim, causal=causal, hides=hides,
        threads=min(threads_for(batch * heads * queries * keys * dim), batch * groups), q_step=q.stride()[:3],
        k_step=k.stride()[:3], v_step=v.stride()[:3], added_step=steps, scale=scale,
        **{what: tensor.data_ptr() for what, tensor in more.items() if tensor is not None},
    )  # fmt: skip
    seen.room_step = known.named["attention_workspace", q.dtype](ctypes.byref(seen))
    room = q.new_empty(seen.threads * seen.room_step)
    seen.room = room.data_ptr()
    known.named[name, q.dtype](ctypes.byref(seen))


def attention(
    known: Kernels, x: Tensor, memory: Tensor | None, maps: Sequence[Tensor | None], heads: tuple[int, int],
    scale: float, added: Tensor | None, causal: bool,
) -> Tensor:  # fmt: skip
    """Maps to queries, keys and values, what queries find as `attend` has it, and the last map: x (batch, n, width).

    memory: (batch, m, width) where keys and values are of it, and not of x.
    maps:   weight and bias of each of the four.
    heads:  of queries, of keys.
    """
    return _Attention.apply(known, x, memory, heads, scale, added, causal, *maps)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, known: Kernels, x: Tensor, memory: Tensor | None, heads: tuple[int, int], scale: float,
        added: Tensor | None, causal: bool, *maps: Tensor | None,
    ) -> Tensor:  # fmt: skip
        weights, biases = [m for m in maps[::2] if m is not None], maps[1::2]
        into = [(weight.T, bias) for weight, bias in zip(weights, biases, strict=True)]
        rows = x.reshape(-1, x.shape[-1])
        source = None if memory is None else memory.reshape(-1, memory.shape[-1])
        of = rows if source is None else source
        q, k, v = (product(known, one, weight) for one, (weight, _) in zip((rows, of, of), into[:3], strict=True))
        many = (heads[0], heads[1], heads[1])
        q, k, v = (t.view(len(x), -1, h, t.shape[1] // h).transpose(1, 2) for t, h in zip((q, k, v), many, strict=True))
        batch, _, queries, dim = q.shape
        y, mass = x.new_empty(batch, queries, heads[0] * dim), x.new_empty(batch, heads[0], 2, queries)
        adds = [None if bias is None else bias.contiguous() for bias in biases[:3]]  # while they are read
        _call_attention(
            "attention_forward",
            known,
            q,
            k,
            v,
            added,
            causal,
            scale,
            y=y,
            mass=mass,
            **dict(zip(ADDS, adds, strict=True)),
        )
        ctx.given = known, scale, causal
        ctx.save_for_backward(rows, source, q, k, v, added, y, mass, *weights, *adds)
        return product(known, y.view(-1, y.shape[-1]), *into[3]).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        rows, source, q, k, v, added, y, mass, *maps = ctx.saved_tensors
        adds = dict(zip(ADDS, maps[4:], strict=True))
        known, scale, causal = ctx.given
        wanted, across = ctx.needs_input_grad, source is not None
        up = dy.reshape(-1, dy.shape[-1])
        dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1] * t.shape[3]) for t in (q, k, v))
        more = {"y": y, "mass": mass, "dy": product(known, up, maps[3]), "dq": dq, "dk": dk, "dv": dv}
        _call_attention("attention_backward", known, q, k, v, added, causal, scale, **more, **adds)
        ups = [*(d.view(-1, d.shape[-1]) for d in (dq, dk, dv)), up]
        dx = product(known, ups[0], maps[0]) if wanted[1] else None
        dmemory = product(known, ups[1], maps[1]) if across and wanted[2] else None
        for to, i in ((dmemory, 2),) if across else ((dx, 1), (dx, 2)):
            if to is not None:
                product_into(known, ups[i], maps[i], to, True)
        of = source if across else rows
        asked = [*zip((rows, of, of, y.view(-1, y.shape[-1])), ups, maps[:4], strict=True)]
        learning = [i for i in range(4) if wanted[7 + 2 * i]]
        grads = dict(zip(learning, gather(known, *(asked[i] for i in learning)), strict=True))
        each = [(grads.get(i), ups[i].sum(0) if wanted[8 + 2 * i] else None) for i in range(4)]
        back = (None if d is None else d.view(len(q), -1, d.shape[1]) for d in (dx, dmemory))
        return None, *back, None, None, None, None, *(grad for pair in each for grad in pair)


def mlp(
    known: Kernels, x: Tensor, into: Tensor, add: Tensor | None, activation: str, out: Tensor, last: Tensor | None
) -> Tensor:
    """x (..., width) -> out activation(into x + add) + last"""
    return _Mlp.apply(known, x, into, add, activation, out, last)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        known: Kernels,
        x: Tensor,
        into: Tensor,
        add: Tensor | None,
        activation: str,
        out: Tensor,
        last: Tensor | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        hidden, activated = activated_product(known, rows, into.T, add, activation)
        ctx.known, ctx.activation = known, activation
        ctx.save_for_backward(rows, hidden, into, out)
        return product(known, activated, out.T, last).view(*x.shape[:-1], out.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        rows, hidden, into, out = ctx.saved_tensors
        up = dy.reshape(-1, dy.shape[-1])
        down, activated = activation_backward_product(ctx.known, up, out, hidden, ctx.activation)
        wanted = ctx.needs_input_grad
        return (
            None,
            product(ctx.known, down, into).view(*dy.shape[:-1], into.shape[1]) if wanted[1] else None,
            gather(ctx.known, (rows, down, into))[0] if wanted[2] else None,
            down.sum(0) if wanted[3] else None,
            None,
            gather(ctx.known, (activated, up, out))[0] if wanted[5] else None,
            up.sum(0) if wanted[6] else None,
        )


class Sums(Protocol):
    """Who adds up gradients."""

    def room(self, weight: Tensor) -> Tensor | None:
        """Where those of a weight are added up; None: elsewhere."""


class _Now(threading.local):
    sums: Sums | None = None
    share: float = 1.0


_now = _Now()


@contextmanager
def adding_to(sums: Sums, share: float) -> Iterator[None]:
    """Gradients of weights are added to what is there as they are made, where kernels make them; otherwise they are
    made first, and then read and added.

    share: what a loss is multiplied by before it is learned from, so that a gradient that is made with the loss is the
           right one.
    """
    before = _now.sums, _now.share
    _now.sums, _now.share = sums, share
    try:
        yield
    finally:
        _now.sums, _now.share = before


def adds_to(weight: Tensor) -> tuple[float, Tensor | None]:
    """By what a gradient that is made with the loss is multiplied, and where it is added up; 1, None: it is not, as on
    other devices, which would have to be waited for to know that it was right."""
    room = None if _now.sums is None or not weight.is_cpu else _now.sums.room(weight)
    return (1.0, None) if room is None else (_now.share, room)


def look_up(table: Tensor, numbers: Tensor) -> Tensor:
    """Rows of a table (rows, dim), on a CPU: what is learned of them is added where the rest of the table's
    gradient is, and there is no table of zeros for it."""
    if _now.sums is None or not table.requires_grad or not table.is_cpu or not torch.is_grad_enabled():
        return F.embedding(numbers, table)
    return _LookUp.apply(table, numbers)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(table, numbers)
        return F.embedding(numbers, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        table, numbers = ctx.saved_tensors
        room = adds_to(table)[1]
        to = torch.zeros_like(table) if room is None else room
        to.index_add_(0, numbers.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        return to if room is None else None, None


def gather(known: Kernels, *asked: tuple[Tensor, Tensor, Tensor]) -> list[Tensor | None]:
    """up^T x, the gradient of a weight (out, in), for each x, up and weight; None when it was added to what is there.
    An x that comes again is laid out once."""
    grads: list[Tensor | None] = []
    often, laid = Counter(id(x) for x, _, _ in asked), dict[int, PackedMatrix]()
    for x, up, weight in asked:
        if often[id(x)] > 1 and id(x) not in laid and pays(known, len(x), weight):
            laid[id(x)] = pack_matrix(known, x)
        room = adds_to(weight)[1]
        to = up.new_empty(weight.shape) if room is None else room
        made = product_into(known, up.T, x, to, room is not None, laid.get(id(x)))
        grads.append(made if room is None else None)
    return grads


def linear(known: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., in), weight (out, in) -> x weight^T + bias"""
    return _Linear.apply(known, x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, known: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        rows = x.reshape(-1, x.shape[-1])
        ctx.known = known
        ctx.save_for_backward(rows, weight)
        return product(known, rows, weight.T, bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        (rows, weight), wanted = ctx.saved_tensors, ctx.needs_input_grad
        up = dy.reshape(-1, dy.shape[-1])
        return (
            None,
            product(ctx.known, up, weight).view(*dy.shape[:-1], weight.shape[1]) if wanted[1] else None,
            gather(ctx.known, (rows, up, weight))[0] if wanted[2] else None,
            up.sum(0) if wanted[3] else None,
        )


def drop(known: Kernels, x: Tensor, stream: Tensor | None, dropped: int, scale: float) -> Tensor:
    """stream + x times a scale, but for those (dropped of 65,536) that are left out."""
    return _Drop.apply(known, x, stream, dropped, scale)


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, known: Kernels, x: Tensor, stream: Tensor | None, dropped: int, scale: float):  # type: ignore[override]
        ctx.given = known, dropped, scale, int(torch.empty((), dtype=torch.int64).random_())
        return _dropped(x.contiguous(), None if stream is None else stream.contiguous(), *ctx.given)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        return None, _dropped(dy.contiguous(), None, *ctx.given), dy if ctx.needs_input_grad[2] else None, None, None


def _dropped(x: Tensor, stream: Tensor | None, known: Kernels, dropped: int, scale: float, seed: int) -> Tensor:
    y = torch.empty_like(x)
    known.named["drop", x.dtype](
        x.data_ptr(), None if stream is None else stream.data_ptr(), y.data_ptr(), x.numel(), dropped, scale, seed,
        threads_for(x.numel()),
    )  # fmt: skip
    return y


def powers(known: Kernels, rows: Tensor, bias: Tensor | None, goal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (n, words) of logits in bits become 2^(logit - the largest), after a bias is added, which is not in bits. Of
    each row, (n, 1): the largest, the sum, the logit of its goal."""
    top, mass, right = rows.new_empty(3, len(rows), 1)
    bias = None if bias is None else bias.contiguous()
    known.named["powers", rows.dtype](
        rows.data_ptr(), None if bias is None else bias.data_ptr(), goal.data_ptr(), top.data_ptr(), mass.data_ptr(),
        right.data_ptr(), *rows.shape, threads_for(rows.numel()),
    )  # fmt: skip
    return top, mass, right
