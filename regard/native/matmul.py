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

MAX_KEPT = 1 << 24  # bytes of a buffer that is kept for the next product, since allocating takes longer than filling it


class _Buffers(threading.local):
    """The buffers of each thread."""

    def __init__(self) -> None:
        self.rooms: dict[tuple[str, torch.dtype], Tensor] = {}


_buffers = _Buffers()


class PackedMatrix(NamedTuple):
    """A matrix (deep, wide) in the layout of the kernel."""

    numbers: Tensor
    deep: int
    wide: int


def _buffer(what: str, like: Tensor, size: int) -> Tensor:
    """Return a buffer of `size` elements, valid until the next product in this thread."""
    if size * like.element_size() > MAX_KEPT:
        return like.new_empty(size)
    held = _buffers.rooms.get((what, like.dtype))
    if held is None or len(held) < size:
        held = _buffers.rooms[what, like.dtype] = like.new_empty(size)
    return held


def pack_matrix(kernels: Kernels, p: Tensor, passing: bool = False) -> PackedMatrix:
    """Pack p (deep, wide). passing: only for the next product."""
    deep, wide = p.shape
    panel = kernels.panel[p.dtype]
    size = -(-wide // panel) * panel * deep
    made = _buffer("panels", p, size) if passing else p.new_empty(size)
    kernels.named["pack", p.dtype](p.data_ptr(), made.data_ptr(), deep, wide, *p.stride(), threads_for(p.numel()))
    return PackedMatrix(made, deep, wide)


def multiply(
    kernels: Kernels, x: Tensor, p: Tensor | PackedMatrix, bias: Tensor | None = None, to: Tensor | None = None,
    adds: bool = False, activation: str = "", activated: Tensor | None = None, hidden: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x (rows, deep) p (deep, wide) + bias, written into `to`, whose columns are contiguous, or added to it.

    activation: of the product, into `activated`; or, where `hidden` is given, of that, and the product is multiplied by
        its derivative there. `hidden` and `activated` have the strides of the product.
    """
    if 1 not in x.stride():
        x = x.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    given = p if isinstance(p, PackedMatrix) else pack_matrix(kernels, p, passing=True)
    (rows, deep), wide = x.shape, given.wide
    y = x.new_empty(rows, wide) if to is None else to
    if not deep:
        return y if adds else y.zero_() if bias is None else y.copy_(bias.expand_as(y))
    many = threads_for(rows * deep * wide)
    room = _buffer("rows", x, many * kernels.piece[x.dtype])
    at = [None if t is None else t.data_ptr() for t in (x, given.numbers, bias, y, room, hidden, activated)]
    how = ACTIVATIONS.index(activation) if activation else 0
    times = MatmulArgs(*at, rows, wide, deep, *x.stride(), y.stride(0), adds, how, many)
    kernels.named["multiply", x.dtype](ctypes.byref(times))
    return y
