"""RWKV's time mix: a mean of all values so far, weighted by their keys and by a decay with distance, per channel.

                sum over s < t of  exp(k_s - (t - 1 - s) w) v_s  +  exp(u + k_t) v_t
    wkv_t  =    --------------------------------------------------------------------        w = exp(decay) > 0
                sum over s < t of  exp(k_s - (t - 1 - s) w)      +  exp(u + k_t)

    y_t = W_o (sigmoid(r_t) * wkv_t)           r, k, v: projections of x_t mixed with x_(t-1), each with its own mix

Both sums are stored divided by exp(p_t), where p_t is their largest exponent, so that they never overflow. Peng et al.
2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048 (version 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.bases.shift import filled_parameter, mixed, shift, shifted
from regard.core import Context, Cost, Growth, Mixer, Place
from regard.ops.fading import accumulation_dtype
from regard.ops.scan import max_scan, scan


class RwkvState(NamedTuple):
    """The previous vector, and the running sums of each channel."""

    last: Tensor  # (batch, width) the previous vector
    sums: Tensor  # (batch, 2, hidden) weighted values and weights, divided by exp(peak)
    peak: Tensor  # (batch, hidden) largest exponent, -inf at the start


class Rwkv4(Mixer[RwkvState]):
    """hidden: channels of r, k and v; None: the width.
    bias:      the four projections have a bias. The paper has none.
    """

    examples = ({}, {"hidden": 10, "bias": True})

    def __init__(
        self, width: int, hidden: int | None = None, bias: bool = False, depth: int = 1, place: Place | None = None
    ):
        super().__init__()
        hidden, index = hidden or width, place.index if place else 0
        self.width, self.hidden = width, hidden
        self.r, self.k, self.v = (nn.Linear(width, hidden, bias=bias) for _ in range(3))
        self.out = nn.Linear(hidden, width, bias=bias)
        depth_ratio, exponent = index / max(depth - 1, 1), 1 - index / depth  # as in the paper
        along = (torch.arange(width) / width) ** exponent
        self.mix_r, self.mix_k, self.mix_v = map(filled_parameter, (along**0.5, along, along + 0.3 * depth_ratio))
        channel = torch.arange(hidden) / max(hidden - 1, 1)
        self.decay = filled_parameter(
            -5 + 8 * channel ** (0.7 + 1.3 * depth_ratio)
        )  # from immediate decay to hundreds of positions
        self.bonus = filled_parameter(math.log(0.3) + 0.5 * ((torch.arange(hidden) + 1) % 3 - 1))

    def start(self, context: Context, capacity: int) -> RwkvState:
        batch, like = context.positions.shape[0], self.decay
        sums = like.new_zeros(batch, 2, self.hidden, dtype=accumulation_dtype(like.dtype))
        return RwkvState(like.new_zeros(batch, self.width), sums, torch.full_like(sums[:, 0], -math.inf))

    def step(self, x: Tensor, state: RwkvState, context: Context) -> tuple[Tensor, RwkvState]:
        before, last = shift(x, state.last.to(x.dtype), context)
        r = self.r(mixed(x, before, self.mix_r))  # (batch, time, hidden), as k and v
        k, v = self.k(mixed(x, before, self.mix_k)), self.v(mixed(x, before, self.mix_v))
        with torch.autocast(x.device.type, enabled=False):
            mean, sums, peak = self._weigh(
                k.to(accumulation_dtype(k.dtype)), v.to(accumulation_dtype(v.dtype)), state, context
            )
        return self.out(r.sigmoid() * mean.to(r.dtype)), RwkvState(last.to(state.last.dtype), sums, peak)

    def _weigh(self, k: Tensor, v: Tensor, state: RwkvState, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        decay, bonus = self.decay.to(k.dtype).exp(), self.bonus.to(k.dtype)
        log_gate = -decay.detach().expand(1, k.shape[1], -1)
        top = max_scan(log_gate, k, state.peak)  # (batch, time, hidden)
        earlier, peak = shifted(state.peak, top, context)
        weight = (k - top).exp()
        gate = (earlier - top - decay).exp()[:, :, None]
        sums = scan(gate, torch.stack((weight * v, weight), 2), state.sums)  # (batch, time, 2, hidden)
        old, sums = shifted(state.sums, sums, context)
        highest = torch.maximum(earlier, (k + bonus).detach())
        kept, own = (earlier - highest).exp(), (k + bonus - highest).exp()
        mean = (kept * old[:, :, 0] + own * v) / (kept * old[:, :, 1] + own)
        return mean, sums, peak

    def cost(self, length: int, past: int = 0) -> Cost:
        weights = 4 * self.width * self.hidden
        kept = self.width * self.decay.element_size() + 3 * self.hidden * accumulation_dtype(self.decay.dtype).itemsize
        return Cost(2 * length * weights, kept)

    def growth(self) -> Growth:
        return Growth("n·d²", "√n", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
