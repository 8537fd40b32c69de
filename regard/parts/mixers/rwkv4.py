"""RWKV's time mix: a mean of all values so far, weighted by their keys and faded by age, channel by channel.

                sum over s < t of  exp(k_s - (t - 1 - s) w) v_s  +  exp(u + k_t) v_t
    wkv_t  =    --------------------------------------------------------------------        w = exp(decay) > 0
                sum over s < t of  exp(k_s - (t - 1 - s) w)      +  exp(u + k_t)

    y_t = W_o (sigmoid(r_t) * wkv_t)           r, k, v: maps of x_t mixed with x_(t-1), each with a mix of its own

Both sums are carried divided by exp(p_t), where p_t is their largest exponent, so that no key is too large and no decay
too fast. Peng et al. 2023, "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048 (version 4).
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


class Weighed(NamedTuple):
    """What has been seen, for each channel."""

    last: Tensor  # (batch, width) the vector before
    sums: Tensor  # (batch, 2, hidden) of weighted values and of weights, over exp(peak)
    peak: Tensor  # (batch, hidden) the largest exponent, -inf before the first


class Rwkv4(Mixer[Weighed]):
    """hidden: channels of r, k and v; None: the width.
    bias:      of the four maps. The paper has none.
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
        deep, left = index / max(depth - 1, 1), 1 - index / depth  # from the first layer to the last, as in the paper
        along = (torch.arange(width) / width) ** left
        self.mix_r, self.mix_k, self.mix_v = map(filled_parameter, (along**0.5, along, along + 0.3 * deep))
        place_of = torch.arange(hidden) / max(hidden - 1, 1)
        self.decay = filled_parameter(
            -5 + 8 * place_of ** (0.7 + 1.3 * deep)
        )  # some forget at once, some after hundreds
        self.bonus = filled_parameter(math.log(0.3) + 0.5 * ((torch.arange(hidden) + 1) % 3 - 1))

    def start(self, context: Context, capacity: int) -> Weighed:
        batch, like = context.positions.shape[0], self.decay
        sums = like.new_zeros(batch, 2, self.hidden, dtype=accumulation_dtype(like.dtype))
        return Weighed(like.new_zeros(batch, self.width), sums, torch.full_like(sums[:, 0], -math.inf))

    def step(self, x: Tensor, state: Weighed, context: Context) -> tuple[Tensor, Weighed]:
        before, last = shift(x, state.last.to(x.dtype), context)
        r = self.r(mixed(x, before, self.mix_r))  # (batch, time, hidden), as k and v
        k, v = self.k(mixed(x, before, self.mix_k)), self.v(mixed(x, before, self.mix_v))
        with torch.autocast(x.device.type, enabled=False):
            mean, sums, peak = self._weigh(
                k.to(accumulation_dtype(k.dtype)), v.to(accumulation_dtype(v.dtype)), state, context
            )
        return self.out(r.sigmoid() * mean.to(r.dtype)), Weighed(last.to(state.last.dtype), sums, peak)

    def _weigh(self, k: Tensor, v: Tensor, state: Weighed, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        fall, bonus = self.decay.to(k.dtype).exp(), self.bonus.to(k.dtype)
        fade = -fall.detach().expand(1, k.shape[1], -1)
        top = max_scan(fade, k, state.peak)  # (batch, time, hidden)
        earlier, peak = shifted(state.peak, top, context)
        weight = (k - top).exp()
        gate = (earlier - top - fall).exp()[:, :, None]
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
