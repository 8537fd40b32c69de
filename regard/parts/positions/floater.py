"""Continuous positions: a vector that flows, its motion learned, and is met by each position at its own time, so that
places have no end and need no table.

    p(0) learned,    dp/dt = f(p, t),    f(p, t) = W_2 [relu(W_1 [p; t] + b_1); t] + b_2
    q_n + p_q(n dt),    k_n + p_k(n dt),    v_n + p_v(n dt)          in the place of the maps' biases

Liu et al. 2020, "Learning to Encode Position for Transformer with Continuous Dynamical Model" (FLOATER),
arXiv:2003.09229. All layers flow alike, from beginnings of their own: name it as the stack's position, and "shared" in
its attentions.

The equation is solved by Runge-Kutta steps (the 3/8 rule) of a fixed size, so that a place never depends on how long a
sequence is; where a step spans several positions, those between lie on the cubic through its ends and their slopes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Position, UserError

FEWEST = 64  # positions that are solved at once where nothing is to be learned


class Floater(Position):
    """dt: time from one position to the next.
    step:  of the solver, in positions: a whole number of them, or a whole part of one such as 0.2.
    """

    examples = ({"step": 4}, {"dt": 0.1, "step": 0.5}, {"dt": 0.05, "step": 1})

    def __init__(self, heads: int, dim: int, dt: float = 0.01, step: float = 16):
        super().__init__()
        self.heads, self.dim, self.dt, self.step = heads, dim, dt, step
        self.every = max(round(step), 1)  # positions between those that the solver comes by
        self.steps = 1 if step >= 1 else round(1 / step) if step > 0 else 0  # of the solver between them
        if dt <= 0 or not self.steps or abs(self.every / self.steps - step) > 1e-6:
            raise UserError(
                f"floater needs dt above 0 and a step that is a whole number or 1 over one, not {dt} and {step}"
            )
        self.flow = Flow(heads * dim)
        self.begin = nn.Parameter(torch.empty(3, heads * dim).normal_(std=(heads * dim) ** -0.5))  # of q, k and v
        self.taken = False
        self.known: tuple[tuple, Tensor] | None = None

    def for_layer(self) -> Floater:
        if not self.taken:
            self.taken = True
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
        """x (batch, heads, time, dim); where there are fewer heads of keys, they take the first channels."""
        if not at.numel():
            return x
        places = F.embedding(at, self.places(role, int(at.max()) + 1))  # (batch or 1, time, channels)
        return x + places.unflatten(-1, (self.heads, self.dim)).transpose(1, 2)[:, : x.shape[1]].to(x.dtype)

    def places(self, role: int, count: int) -> Tensor:
        """(count, channels): p at positions 0, 1, 2, ... Where nothing is to be learned, they depend on the parameters
        alone, as a table does, and are kept until those change; so `flops` does not count them."""
        parameters = list(self.parameters())
        if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
            self.known = None  # since not every optimizer tells that it changed them
            return self._solve(self.begin[role : role + 1], count)[:, 0]
        stamp = (
            () if any(p.is_inference() for p in parameters) else tuple((p.data_ptr(), p._version) for p in parameters)
        )
        if self.known is None or not stamp or self.known[0] != stamp or len(self.known[1]) < count:
            with torch.inference_mode(False), torch.no_grad():  # they may be met again in training
                more = max(FEWEST, 1 << (count - 1).bit_length())
                self.known = stamp, self._solve(self.begin, more)
        return self.known[1][:count, role]

    def _solve(self, p: Tensor, count: int) -> Tensor:
        """p (rows, channels) at position 0 -> (count, rows, channels). Half floats are too coarse to add up."""
        exact = torch.promote_types(p.dtype, torch.float32)
        stops = count - 1 if self.every == 1 else -(-count // self.every)  # after the beginning
        h = self.every * self.dt / self.steps  # of a step, in time
        points, slopes = [p.to(exact)], []
        with torch.autocast(p.device.type, enabled=False):
            slope = self.flow.every(h / 3, 3 * stops * self.steps + 1, exact)
            for step in range(stops * self.steps):
                p, third = points[-1], 3 * step
                one = slope(p, third)
                two = slope(torch.add(p, one, alpha=h / 3), third + 1)
                three = slope(torch.add(torch.add(p, two, alpha=h), one, alpha=-h / 3), third + 2)
                four = slope(torch.add(p, one - two + three, alpha=h), third + 3)
                points.append(torch.add(p, torch.add(one + four, two + three, alpha=3), alpha=h / 8))
                slopes.append(one)
            slopes.append(slope(points[-1], 3 * stops * self.steps))
        points, slopes = points[:: self.steps], slopes[:: self.steps]
        return torch.stack(points)[:count] if self.every == 1 else self._between(points, slopes, count)

    def _between(self, points: list[Tensor], slopes: list[Tensor], count: int) -> Tensor:
        """(count, rows, channels): the cubic Hermite curve through points that are `every` positions apart."""
        here, speed = torch.stack(points), torch.stack(slopes) * (self.every * self.dt)
        ends = torch.stack((here[:-1], speed[:-1], here[1:], speed[1:]), 1).flatten(2)  # (stops, 4, rows * channels)
        a = torch.arange(self.every, device=here.device, dtype=here.dtype) / self.every  # how far between them
        b = 1 - a
        basis = torch.stack((b * b * (1 + 2 * a), b * b * a, a * a * (3 - 2 * a), -a * a * b), 1)  # (every, 4)
        return (basis @ ends).flatten(0, 1).unflatten(-1, here.shape[1:])[:count]


class Flow(nn.Module):
    """f above. It begins as an even motion in a straight line: one that depends on p can grow exponentially, and far
    places would be out of reach before anything is learned."""

    def __init__(self, channels: int):
        super().__init__()
        self.into, self.out = nn.Linear(channels + 1, channels), nn.Linear(channels + 1, channels)
        nn.init.xavier_normal_(self.into.weight)
        nn.init.zeros_(self.into.bias)
        nn.init.zeros_(self.out.weight)
        nn.init.normal_(self.out.bias, std=0.5)

    def every(self, apart: float, count: int, dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
        """A function of p (rows, channels) and the number of a moment, among so many from 0 on, so far apart; what time
        adds to the maps is the same for all p, so it is made at once."""
        one, two = (m.weight.to(dtype) for m in (self.into, self.out))
        times = apart * torch.arange(count, device=one.device, dtype=dtype)[:, None]
        lifts = [(m.bias.to(dtype) + times * w[:, -1]).unbind() for m, w in ((self.into, one), (self.out, two))]
        one, two = one[:, :-1].mT, two[:, :-1].mT

        def slope(p: Tensor, moment: int) -> Tensor:
            return torch.addmm(lifts[1][moment], F.relu(torch.addmm(lifts[0][moment], p, one)), two)

        return slope
