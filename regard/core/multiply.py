"""Products of many rows by a kernel of our own, multiply.cpp, for CPUs that torch's library was not made for.
What is multiplied by is laid out once and may be used again; what follows on a product, such as a bend, is done while
its numbers are near."""

from __future__ import annotations

import ctypes
import threading
from ctypes import Structure, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .native import BENDS, Kernels

LEAST, NARROW = 1 << 21, 256  # multiplications from which on, and channels up to which it pays
KEPT = 1 << 24  # bytes of room, up to which it is kept for the next product: asking for it takes longer than filling it


class _Kept(threading.local):
    """Of each thread."""

    def __init__(self) -> None:
        self.rooms: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


class Times(Structure):
    """As multiply.cpp has it."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "panels", "bias", "y", "room", "hidden", "bent")),
        *((name, c_int64) for name in ("rows", "wide", "deep", "x_row", "x_deep", "y_row", "adds", "how", "threads")),
    )


class Panels(NamedTuple):
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


def panels(known: Kernels, p: Tensor, passing: bool = False) -> Panels:
    """Of p (deep, wide). passing: for one product alone."""
    deep, wide = p.shape
    panel = known.panel[p.dtype]
    size = -(-wide // panel) * panel * deep
    made = _room("panels", p, size) if passing else p.new_empty(size)
    known.named["pack", p.dtype](p.data_ptr(), made.data_ptr(), deep, wide, *p.stride(), native.threads(p.numel()))
    return Panels(made, deep, wide)


def multiply(
    known: Kernels, x: Tensor, p: Tensor | Panels, bias: Tensor | None = None, to: Tensor | None = None,
    adds: bool = False, bend: str = "", bent: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x (rows, deep) p (deep, wide) + bias, into `to`, whose columns lie side by side, or added to what is there.

    bend:   what comes after it. Of the product, into `bent`; or, where hidden numbers are given, of these, and the
            product is multiplied by its slope there. What is hidden and bent lies as the product does.
    """
    if 1 not in x.stride():
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    given = p if isinstance(p, Panels) else panels(known, p, passing=True)
    (rows, deep), wide = x.shape, given.wide
    y = x.new_empty(rows, wide) if to is None else to
    if not deep:
        return y if adds else y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    many = native.threads(rows * deep * wide)
    room = _room("rows", x, many * known.piece[x.dtype])
    at = [None if t is None else t.data_ptr() for t in (x, given.numbers, bias, y, room, hidden, bent)]
    how = BENDS.index(bend) if bend else 0
    times = Times(*at, rows, wide, deep, *x.stride(), y.stride(0), adds, how, many)
    known.named["multiply", x.dtype](ctypes.byref(times))
    return y


def product(known: Kernels, x: Tensor, p: Tensor, bias: Tensor | None = None) -> Tensor:
    """x p + bias, by whoever is faster here."""
    if pays(known, len(x), p):
        return multiply(known, x, p, bias)
    return x @ p if bias is None else torch.addmm(bias, x, p)


def product_into(
    known: Kernels | None, x: Tensor, p: Tensor, to: Tensor, adds: bool, laid: Panels | None = None
) -> Tensor:
    """x p into `to`, or added to what is there, by whoever is faster here. laid: p, where it is laid out already."""
    if known is not None and pays(known, len(p), to) and to.stride(1) == 1:
        return multiply(known, x, laid or p, to=to, adds=adds)
    return to.addmm_(x, p, beta=int(adds))


def bent_product(known: Kernels, x: Tensor, p: Tensor, bias: Tensor | None, bend: str) -> tuple[Tensor, Tensor]:
    """x p + bias, and the bend of it; one and the same, where the slope can be told from what is bent."""
    own = pays(known, len(x), p)
    hidden = x.new_empty(len(x), p.shape[1]) if own else x @ p
    bent = hidden if bend in ("identity", "relu") else torch.empty_like(hidden)
    if own:
        multiply(known, x, p, bias, hidden, bend=bend, bent=bent)
    else:
        bias = None if bias is None else bias.contiguous()
        at = [None if t is None else t.data_ptr() for t in (hidden, bias, bent)]
        known.named["bend", x.dtype](*at, *hidden.shape, BENDS.index(bend), native.threads(hidden.numel()))
    return hidden, bent


def unbent_product(known: Kernels, x: Tensor, p: Tensor, hidden: Tensor, bend: str) -> tuple[Tensor, Tensor]:
    """x p times the slope of the bend at what is hidden, and the bend of that."""
    bent = torch.empty_like(hidden)
    if pays(known, len(x), p):
        return multiply(known, x, p, bend=bend, bent=bent, hidden=hidden), bent
    y, size = product(known, x, p), hidden.numel()
    known.named["unbend", x.dtype](
        hidden.data_ptr(), bent.data_ptr(), y.data_ptr(), size, BENDS.index(bend), native.threads(size)
    )
    return y, bent
