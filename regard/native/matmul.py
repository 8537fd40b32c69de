"""Matrix products of many rows by matmul.cpp, for CPUs that torch's library was not made for. The second matrix is
packed once and may be used again; an activation after the product is computed while its numbers are in the cache."""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .build import Kernels, threads_for
from .decode import ACTIVATIONS
from .structs import MatmulArgs

LEAST, NARROW = 1 << 21, 256  # multiplications from which on, and channels up to which it pays
KEPT = 1 << 24  # bytes of room, up to which it is kept for the next product: asking for it takes longer than filling it


class _Kept(threading.local):
    """Of each thread."""

    def __init__(self) -> None:
        self.rooms: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


class PackedMatrix(NamedTuple):
    """A matrix (deep, wide) as products want it."""

    numbers: Tensor
    deep: int
    wide: int


def pays(known: Kernels, rows: int, weight: Tensor) -> bool:
    """Whether our own products are faster for so many rows: where they are narrow, torch spends too long on laying them
    out."""
    return known.multiplies and rows * weight.numel() >= LEAST and min(weight.shape) <= NARROW


def _room(what: str, like: Tensor, size: int) -> Tensor:
    """For so many numbers, until the next product in this thread."""
    if size * like.element_size() > KEPT:
        return like.new_empty(size)
    held = _kept.rooms.get((what, like.dtype))
    if held is None or len(held) < size:
        held = _kept.rooms[what, like.dtype] = like.new_empty(size)
    return held


def pack_matrix(known: Kernels, p: Tensor, passing: bool = False) -> PackedMatrix:
    """Of p (deep, wide). passing: for one product alone."""
    deep, wide = p.shape
    panel = known.panel[p.dtype]
    size = -(-wide // panel) * panel * deep
    made = _room("panels", p, size) if passing else p.new_empty(size)
    known.named["pack", p.dtype](p.data_ptr(), made.data_ptr(), deep, wide, *p.stride(), threads_for(p.numel()))
    return PackedMatrix(made, deep, wide)


def multiply(
    known: Kernels, x: Tensor, p: Tensor | PackedMatrix, bias: Tensor | None = None, to: Tensor | None = None,
    adds: bool = False, activation: str = "", activated: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (rows, deep) p (deep, wide) + bias, into `to`, whose columns lie side by side, or added to what is there.

    activation: of the product, into `activated`; or, where `hidden` is given, of that, and the product is multiplied by
        its derivative there. `hidden` and `activated` have the strides of the product.
    """
    if 1 not in x.stride():
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    given = p if isinstance(p, PackedMatrix) else pack_matrix(known, p, passing=True)
    (rows, deep), wide = x.shape, given.wide
    y = x.new_empty(rows, wide) if to is None else to
    if not deep:
        return y if adds else y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    many = threads_for(rows * deep * wide)
    room = _room("rows", x, many * known.piece[x.dtype])
    at = [None if t is None else t.data_ptr() for t in (x, given.numbers, bias, y, room, hidden, activated)]
    how = ACTIVATIONS.index(activation) if activation else 0
    times = MatmulArgs(*at, rows, wide, deep, *x.stride(), y.stride(0), adds, how, many)
    known.named["multiply", x.dtype](ctypes.byref(times))
    return y


def product(known: Kernels, x: Tensor, p: Tensor, bias: Tensor | None = None) -> Tensor:
    """x p + bias, by whoever is faster here."""
    if pays(known, len(x), p):
        return multiply(known, x, p, bias)
    return x @ p if bias is None else torch.addmm(bias, x, p)


def product_into(
    known: Kernels | None, x: Tensor, p: Tensor, to: Tensor, adds: bool, laid: PackedMatrix | None = None
) -> Tensor:
    """x p into `to`, or added to what is there, by whoever is faster here. laid: p, where it is laid out already."""
    if known is not None and pays(known, len(p), to) and to.stride(1) == 1:
        return multiply(known, x, laid or p, to=to, adds=adds)
    return to.addmm_(x, p, beta=int(adds))


def activated_product(
    known: Kernels, x: Tensor, p: Tensor, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor]:
    """x p + bias, and its activation; one and the same, where the slope can be told from what is activated."""
    own = pays(known, len(x), p)
    hidden = x.new_empty(len(x), p.shape[1]) if own else x @ p
    activated = hidden if activation in ("identity", "relu") else torch.empty_like(hidden)
    if own:
        multiply(known, x, p, bias, hidden, activation=activation, activated=activated)
    else:
        bias = None if bias is None else bias.contiguous()
        at = [None if t is None else t.data_ptr() for t in (hidden, bias, activated)]
        how, threads = ACTIVATIONS.index(activation), threads_for(hidden.numel())
        known.named["activation", x.dtype](*at, *hidden.shape, how, threads)
    return hidden, activated


def activation_backward_product(
    known: Kernels, x: Tensor, p: Tensor, hidden: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """x p times the derivative of the activation at what is hidden, and the activation of that."""
    activated = torch.empty_like(hidden)
    if pays(known, len(x), p):
        return multiply(known, x, p, activation=activation, activated=activated, hidden=hidden), activated
    y, size = product(known, x, p), hidden.numel()
    known.named["activation_backward", x.dtype](
        hidden.data_ptr(), activated.data_ptr(), y.data_ptr(), size, ACTIVATIONS.index(activation), threads_for(size)
    )
    return y, activated
