"""Mean: the output of a position is the mean of all positions up to it. The simplest mixer, as a baseline.

    y_t = (x_1 + ... + x_t) / t

With projections around it: Zhang et al. 2018, "Accelerating Neural Transformer via an Average Attention Network",
arXiv:1805.00631.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Context, Cost, Growth, Mixer, UserError


class RunningSum(NamedTuple):
    total: Tensor  # (batch, width)
    count: Tensor  # (batch,)


class Mean(Mixer[RunningSum]):
    """causal: the mean of the past; otherwise of the whole sequence, the same at every position."""

    examples = ({}, {"causal": False})

    def __init__(self, width: int, causal: bool = True):
        super().__init__()
        self.width, self.causal = width, causal
        self.register_buffer("like", torch.zeros(0), persistent=False)  # holds the dtype and the device
        self.like: Tensor

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def start(self, context: Context, capacity: int) -> RunningSum:
        batch = context.positions.shape[0]
        return RunningSum(
            self.like.new_zeros(batch, self.width), torch.zeros(batch, dtype=torch.long, device=self.like.device)
        )

    def step(self, x: Tensor, state: RunningSum, context: Context) -> tuple[Tensor, RunningSum]:
        if not self.causal:
            raise UserError("a mean of the whole sequence needs all of it at once, so it does not step")
        x = _without_padding(x, context)
        total = state.total[:, None] + x.cumsum(1)  # (batch, time, width)
        count = state.count[:, None] + torch.arange(1, x.shape[1] + 1, device=x.device)
        return total / count[..., None], RunningSum(total[:, -1], state.count + context.lengths)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.causal:
            return super().forward(x, context)
        return (
            _without_padding(x, context).sum(1, keepdim=True) / context.lengths.clamp(min=1).view(-1, 1, 1)
        ).expand_as(x)

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(0, self.width * self.like.element_size() + 8 if self.causal else 0)

    def growth(self) -> Growth:
        return Growth("n·d", "1", "1")


def _without_padding(x: Tensor, context: Context) -> Tensor:
    """Return x with zeros at padding."""
    return x if context.valid is None else x.masked_fill(~context.valid[..., None], 0.0)
