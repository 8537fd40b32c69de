"""First-order recurrences over a sequence, without a step for each position.

    scan      h_t = gate_t h_(t-1) + x_t
    max_scan  m_t = max(x_t, m_(t-1) + gate_t)

The sequence is split into about sqrt(n) blocks of sqrt(n) positions. All blocks are scanned in parallel, then the block
ends are scanned, then added to each block: 2 sqrt(n) sequential operations and three passes over the data.

Blelloch 1990, "Prefix sums and their applications".
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
    """x (batch, time, ...), gate that broadcasts to it and has all its positions, first (batch, ...) the initial h ->
    all h (batch, time, ...)."""
    note("scan", NO_KERNEL)
    return _Scan.apply(gate, x, first)


def max_scan(gate: Tensor, x: Tensor, first: Tensor) -> Tensor:
    """Return all m, with the shapes of `scan`. It has no gradient."""
    with torch.no_grad():
        return _blocks(gate, x, first, lambda h, g, x: torch.maximum(h + g, x), torch.add)


class _Scan(torch.autograd.Function):
    """Saves only the gates and the result. The gradient is the same recurrence, run backwards."""

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
    """Compute h_t = join(h_(t-1), gate_t, x_t), where `chain` combines two gates into one."""
    time = x.shape[1]
    if time == 1:
        return join(first[:, None], gate, x)
    size = math.isqrt(time - 1) + 1
    count = -(-time // size)
    gate, x = (_cut(t, count, size) for t in (gate, x))  # (batch or 1, blocks, size, ...)
    own, gates = [x[:, :, 0]], [gate[:, :, 0]]  # as if every block began from zero
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
