"""RWKV's channel mix: a feed-forward that also reads the previous position, with a squared ReLU and a gate.

    y_t = sigmoid(W_r r_t) * W_v relu(W_k k_t)²           r_t, k_t: x_t mixed with x_(t-1), each with its own learned
    mix

Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.bases.shift import filled_parameter, mixed, shift
from regard.core import Context, Cost, Dropout, Mixer, Place
from regard.ops.activation import relu_squared


class Last(NamedTuple):
    x: Tensor  # (batch, width) the previous vector, zeros at the start


class ChannelMix(Mixer[Last]):
    """hidden:      hidden channels; None: four times the width.
    bias:           the three projections have a bias. The paper has none.
    hidden_dropout: dropout on the hidden channels.
    """

    examples = ({}, {"hidden": 10, "bias": True})

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        bias: bool = False,
        hidden_dropout: float = 0.0,
        depth: int = 1,
        place: Place | None = None,
    ):
        super().__init__()
        hidden = hidden or 4 * width
        self.width = width
        self.into, self.out = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.gate = nn.Linear(width, width, bias=bias)
        exponent = 1 - (place.index if place else 0) / depth  # deeper layers take less from the previous position
        self.mix_into, self.mix_gate = (filled_parameter((torch.arange(width) / width) ** exponent) for _ in range(2))
        self.drop = Dropout(hidden_dropout)

    def start(self, context: Context, capacity: int) -> Last:
        return Last(self.mix_into.new_zeros(context.positions.shape[0], self.width))

    def step(self, x: Tensor, state: Last, context: Context) -> tuple[Tensor, Last]:
        before, last = shift(x, state.x.to(x.dtype), context)
        hidden = self.drop(relu_squared(self.into(mixed(x, before, self.mix_into))))
        gate = self.gate(mixed(x, before, self.mix_gate)).sigmoid()
        return gate * self.out(hidden), Last(last.to(state.x.dtype))

    def cost(self, length: int, past: int = 0) -> Cost:
        weights = sum(m.weight.numel() for m in (self.into, self.out, self.gate))
        return Cost(2 * length * weights, self.width * self.mix_into.element_size())

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.into.weight, self.out.weight)
