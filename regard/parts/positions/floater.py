"""Continuous positions: position vectors are the solution of a learned differential equation, sampled at equal time
steps. They have no maximum length and need no table.

    p(0) learned,    dp/dt = f(p, t),    f(p, t) = W_2 [relu(W_1 [p; t] + b_1); t] + b_2
    q_n + p_q(n dt),    k_n + p_k(n dt),    v_n + p_v(n dt)          in place of the biases of the projections

Liu et al. 2020, "Learning to Encode Position for Transformer with Continuous Dynamical Model" (FLOATER),
arXiv:2003.09229. All layers share the dynamics and start from their own p(0): name it as the position of the stack,
and "shared" in its attention layers.

The equation is solved by Runge-Kutta steps (the 3/8 rule) of a fixed size, so that a position vector never depends on
the length of the sequence. Where a step spans several positions, those in between are interpolated by a cubic Hermite
spline.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError

MIN_CACHED = 64  # positions that are solved at once for the cache


class Floater(Position):
    """dt: time between two positions.
    step:  step of the solver in positions: an integer, or 1 / integer such as 0.2.
    """

    examples = ({"step": 4}, {"dt": 0.1, "step": 0.5}, {"dt": 0.05, "step": 1})

    def __init__(self, heads: int, dim: int, dt: float = 0.01, step: float = 16):
        super().__init__()
        self.heads, self.dim, self.dt, self.step = heads, dim, dt, step
        self.every = max(round(step), 1)  # positions between two solver points
        self.steps = 1 if step >= 1 else round(1 / step) if step > 0 else 0  # solver steps between two points
        if dt <= 0 or not self.steps or abs(self.every / self.steps - step) > 1e-6:
            raise UserError(
                f"floater needs dt above 0 and a step that is a whole number or 1 over one, not {dt} and {step}"
            )
        self.flow = Flow(heads * dim)
        self.begin = nn.Parameter(torch.empty(3, heads * dim).normal_(std=(heads * dim) ** -0.5))  # of q, k and v
        self.is_used = False
        self.cached: tuple[tuple, Tensor] | None = None

    def for_layer(self) -> Floater:
        if not self.is_used:
            self.is_used = True
            return self
        other = Floater(self.heads, self.dim, self.dt, self.step)
        other.flow = self.flow
        return other

    def query(self, q: Tensor, at: Tensor) -> Tensor:
        return self._add(0, q, at)

    def key(self, k: Tensor, at: Tensor) -> Tensor:
        return self._add(1, k, at)

    def value(self, v: Tensor, at: Tensor) -> Tensor:
        return self._add(2, v, at)

    def _add(self, role: int, x: Tensor, at: Tensor) -> Tensor:
        """Add the position vectors to x (batch, heads, time, dim). Fewer key heads take the first channels."""
        if not at.numel():
            return x
        vectors = F.embedding(at, self.vectors(role, int(at.max()) + 1))  # (batch or 1, time, channels)
        return x + vectors.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)[:, : x.shape[1]].to(x.dtype)

    def vectors(self, role: int, count: int) -> Tensor:
        """Return p at positions 0, 1, 2, ..., (count, channels). Without gradients the vectors are cached until the
        parameters change, as a table would be; so `flops` does not count them."""
        parameters = list(self.parameters())
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            self.cached = None  # since not every optimizer bumps the version of the parameters
            return self._solve(self.begin[role : role + 1], count)[:, 0]
        stamp = (
            () if any(p.is_inference() for p in parameters) else tuple((p.data_ptr(), p._version) for p in parameters)
        )
        if self.cached is None or not stamp or self.cached[0] != stamp or len(self.cached[1]) < count:
            with torch.inference_mode(False), torch.no_grad():  # so that they can be used in training too
                more = max(MIN_CACHED, 1 << (count - 1).bit_length())
                self.cached = stamp, self._solve(self.begin, more)
        return self.cached[1][:count, role]

    def _solve(self, p: Tensor, count: int) -> Tensor:
        """Return (count, rows, channels) from p (rows, channels) at position 0. It runs in float32 or better."""
        exact = torch.promote_types(p.dtype, torch.float32)
        intervals = count - 1 if self.every == 1 else -(-count // self.every)  # between two solver points
        h = self.every * self.dt / self.steps  # step size in time
        points, slopes = [p.to(exact)], []
        with torch.autocast(p.device.type, enabled=False):
            slope = self.flow.slope_function(h / 3, 3 * intervals * self.steps + 1, exact)
            for step in range(intervals * self.steps):
                p, third = points[-1], 3 * step
                one = slope(p, third)
                two = slope(torch.add(p, one, alpha=h / 3), third + 1)
                three = slope(torch.add(torch.add(p, two, alpha=h), one, alpha=-h / 3), third + 2)
                four = slope(torch.add(p, one - two + three, alpha=h), third + 3)
                points.append(torch.add(p, torch.add(one + four, two + three, alpha=3), alpha=h / 8))
                slopes.append(one)
            slopes.append(slope(points[-1], 3 * intervals * self.steps))
        points, slopes = points[:: self.steps], slopes[:: self.steps]
        return torch.stack(points)[:count] if self.every == 1 else self._interpolate(points, slopes, count)

    def _interpolate(self, points: list[Tensor], slopes: list[Tensor], count: int) -> Tensor:
        """Return (count, rows, channels), the cubic Hermite spline through points that are `every` positions apart."""
        here, speed = torch.stack(points), torch.stack(slopes) * (self.every * self.dt)
        ends = torch.stack((here[:-1], speed[:-1], here[1:], speed[1:]), 1).flatten(2)  # (intervals, 4, ...)
        a = torch.arange(self.every, device=here.device, dtype=here.dtype) / self.every  # fraction of the interval
        b = 1 - a
        basis = torch.stack((b * b * (1 + 2 * a), b * b * a, a * a * (3 - 2 * a), -a * a * b), 1)  # (every, 4)
        return (basis @ ends).flatten(0, 1).unflatten(-1, here.shape[1:])[:count]


class Flow(nn.Module):
    """The dynamics f above. They are initialized to a constant velocity: dynamics that depend on p can grow
    exponentially, and vectors of far positions would overflow before anything is learned."""

    def __init__(self, channels: int):
        super().__init__()
        self.into, self.out = nn.Linear(channels + 1, channels), nn.Linear(channels + 1, channels)
        nn.init.xavier_normal_(self.into.weight)
        nn.init.zeros_(self.into.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.normal_(self.out.bias, std=0.5)

    def slope_function(self, interval: float, count: int, dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
        """Return a function of p (rows, channels) and a time index, for `count` times from 0 that are `interval` apart.
        What time adds to the two layers is the same for all p, so it is computed in advance."""
        one, two = (m.weight.to(dtype) for m in (self.into, self.out))
        times = interval * torch.arange(count, device=one.device, dtype=dtype)[:, None]
        offsets = [(m.bias.to(dtype) + times * w[:, -1]).unbind() for m, w in ((self.into, one), (self.out, two))]
        one, two = one[:, :-1].mT, two[:, :-1].mT

        def slope(p: Tensor, moment: int) -> Tensor:
            return torch.addmm(offsets[1][moment], F.relu(torch.addmm(offsets[0][moment], p, one)), two)

        return slope
