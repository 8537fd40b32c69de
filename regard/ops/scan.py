"""A recurrence of the first order over all positions of a sequence, without a step for each.

    scan    h_t = gate_t h_(t-1) + x_t
    peaks   m_t = max(x_t, m_(t-1) + gate_t)

The sequence is laid out in about sqrt(n) blocks of sqrt(n) positions. All blocks go through their positions side by
side, then what one block hands to the next is carried along, then added: 2 sqrt(n) operations in a row, and three
passes over the data, whatever n is. Blelloch 1990, "Prefix sums and their applications".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dispatch import NO_KERNEL, note

Join = Callable[[Tensor, Tensor, Tensor], Tensor]
Chain = Callable[[Tensor, Tensor], Tensor]


def scan(gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """x (batch, time, ...), gate that broadcasts to it and has all its positions, first (batch, ...): the h before ->
    all h (batch, time, ...)."""
    note("scan", NO_KERNEL)
    return _Scan.apply(gate, x, first)


def peaks(gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """The same shapes. Nothing is learned from it: it has no gradient."""
    with torch.no_grad():
        return _blocks(gate, x, first, lambda h, g, x: torch.maximum(h + g, x), torch.add)


class _Scan(torch.autograd.Function):
    """Keeps the gates and the result alone. The gradient is the same recurrence, run from the end."""

    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
        h = _linear(gate, x, first)
        ctx.save_for_backward(gate, h, first)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, h, first = ctx.saved_tensors
        later = torch.cat((gate[:, 1:], torch.zeros_like(gate[:, :1])), 1)  # the gate between a position and the next
        of_x = _linear(later.flip(1), grad.flip(1), torch.zeros_like(first)).flip(1)
        before = torch.cat((first[:, None], h[:, :-1]), 1)
        return (of_x * before).sum_to_size(gate.shape), of_x, of_x[:, 0] * gate[:, 0]


def _linear(gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
    return _blocks(gate, x, first, lambda h, g, x: torch.addcmul(x, g, h), torch.mul)


def _blocks(gate: Tensor, x: Tensor, first: Tensor, join: Join, chain: Chain) -> Tensor:
    """h_t = join(h_(t-1), gate_t, x_t), where chain joins two gates to one."""
    time = x.shape[1]
    if time == 1:
        return join(first[:, None], gate, x)
    size = math.isqrt(time - 1) + 1
    count = -(-time // size)
    gate, x = (_cut(t, count, size) for t in (gate, x))  # (batch or 1, blocks, size, ...)
    own, gates = [x[:, :, 0]], [gate[:, :, 0]]  # as if every block began with nothing
    for i in range(1, size):
        own.append(join(own[-1], gate[:, :, i], x[:, :, i]))
        gates.append(chain(gates[-1], gate[:, :, i]))
    begins = [first]
    for block in range(count - 1):
        begins.append(join(begins[-1], gates[-1][:, block], own[-1][:, block]))
    begin = torch.stack(begins, 1)[:, :, None]
    return join(begin, torch.stack(gates, 2), torch.stack(own, 2)).flatten(1, 2)[:, :time]


def _cut(x: Tensor, count: int, size: int) -> Tensor:
    missing = count * size - x.shape[1]
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
    return x.unflatten(1, (count, size))
