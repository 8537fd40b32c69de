"""What a gated attention unit is besides its mixing: gates and values, several queries and keys of one base, and the
functions that make weights of scores without a softmax.

    u, v = silu(W_in x)          z = silu(W_z x)          each query or key: a z + b

Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447. The laplace weights are from Ma et al. 2022,
"Mega", arXiv:2209.10655.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Place, Position, UserError
from regard.ops.activation import relu_squared
from regard.schema import name_of

from .multihead import attention_position


def laplace(x: Tensor) -> Tensor:
    """A bounded relu squared: the two agree in value and slope at sqrt(1/2)."""
    return 0.5 * (1 + torch.erf((x - math.sqrt(0.5)) * math.sqrt(2 * math.pi)))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu_squared": relu_squared, "laplace": laplace}


class OffsetScale(nn.Module):
    """Queries and keys for the price of none: z (..., dim) -> `count` times (..., dim), each with its own gains and
    shifts."""

    def __init__(self, count: int, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(count, dim).normal_(std=0.02))
        self.shift = nn.Parameter(torch.empty(count, dim).zero_())

    def forward(self, z: Tensor) -> tuple[Tensor, ...]:
        return (z[..., None, :] * self.gain + self.shift).unbind(-2)


class Unit(nn.Module):
    """What surrounds the mixing: values, gates, `count` queries and keys of one base, and the way out."""

    def __init__(self, width: int, hidden: int, dim: int, count: int, bias: bool):
        super().__init__()
        self.into, self.base = nn.Linear(width, 2 * hidden, bias=bias), nn.Linear(width, dim, bias=bias)
        self.offsets = OffsetScale(count, dim)
        self.out = nn.Linear(hidden, width, bias=bias)
        for linear in (self.into, self.base, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """x (batch, time, width) -> values and gates (batch, time, hidden), `count` times (batch, time, dim)."""
        values, gates = F.silu(self.into(x)).chunk(2, -1)
        return values, gates, self.offsets(F.silu(self.base(x)))

    @property
    def flops(self) -> int:
        """Return the flops of its linear layers per position."""
        return 2 * sum(linear.weight.numel() for linear in (self.into, self.base, self.out))


def position_for(spec: Position | str | dict, place: Place | None, width: int, dim: int) -> Position:
    """Return the position of a single head whose weights are not a softmax: it may rotate queries and keys, and add a
    bias to scores."""
    position = attention_position(spec, place, width=width, heads=1, dim=dim)
    if position.acts("output_bias") or position.needs_query:
        raise UserError(
            f"position '{name_of(position)}' does not fit a gated unit: take one that rotates queries and keys "
            "(rotary) or adds to scores (t5, alibi)"
        )
    return position
