"""S4D: a linear state space model per channel with a diagonal matrix, so that the state is a sum of decaying
        oscillations.

    A = diag(-exp(a) + i w)                                                   half of the conjugate pairs
    zoh:       A_d = exp(dt A),                  B_d = (exp(dt A) - 1) / A * B
    bilinear:  A_d = (1 + dt A/2) / (1 - dt A/2),  B_d = dt / (1 - dt A/2) * B
    K_l = 2 Re sum over n of  C_n A_d,n^l B_d,n

Gu et al. 2022, "On the Parameterization and Initialization of Diagonal State Space Models", arXiv:2206.11893.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.bases.state_space import StateSpace, System, flat, hippo, pairs
from regard.core import UserError
from regard.errors import nearest

INITS = ("lin", "inv", "legs")
RULES = ("zoh", "bilinear")


class S4d(StateSpace):
    """state:          real state size per channel; even.
    init:              initial frequencies: "lin" (equally spaced), "inv" (dense at the low ones) or "legs" (HiPPO's).
    rule:              discretization: "zoh" (zero-order hold) or "bilinear".
    learn_b:           B is trained; otherwise it keeps its initial value.
    shortest, longest: the time step dt is drawn between them, on a logarithmic scale.
    activation:        activation of the output.
    out:               output projection: "glu", "linear" or "none".
    """

    examples = (
        {},
        {"state": 6, "init": "inv", "rule": "bilinear", "out": "linear", "activation": "silu"},
        {"state": 2, "init": "legs", "learn_b": False, "out": "none"},
    )

    def __init__(
        self,
        width: int,
        state: int = 64,
        init: str = "lin",
        rule: str = "zoh",
        learn_b: bool = True,
        shortest: float = 0.001,
        longest: float = 0.1,
        activation: str = "gelu",
        out: str = "glu",
    ):
        super().__init__(width, state, shortest, longest, activation, out)
        if init not in INITS:
            raise UserError(f"unknown init '{init}'{nearest(init, INITS)}")
        if rule not in RULES:
            raise UserError(f"unknown rule '{rule}'{nearest(rule, RULES)}")
        self.rule = rule
        n = torch.arange(state // 2, dtype=torch.float64, device="cpu")
        b = torch.ones(state // 2, dtype=torch.complex128, device="cpu")
        if init == "lin":
            imag = math.pi * n
        elif init == "inv":
            imag = state / math.pi * (state / (2 * n + 1) - 1)
        else:
            imag, _, b = hippo(state)
        with torch.no_grad():
            self.imag.copy_(imag.expand(width, -1))
            self.b.copy_(torch.view_as_real(b).expand(width, -1, -1))
        if not learn_b:
            fixed = self.b.detach()
            del self.b
            self.register_buffer("b", fixed)

    def system(self) -> Diagonal:
        poles, dt = self.poles, self.log_dt.to(self.exact).exp()[:, None]
        b, c = (torch.view_as_complex(t.to(self.exact).contiguous()) for t in (self.b, self.c))
        if self.rule == "zoh":
            return Diagonal(dt * poles, b * torch.expm1(dt * poles) / poles, c)
        half = dt * poles / 2
        return Diagonal(torch.log1p(half) - torch.log1p(-half), b * dt / (1 - half), c)

    def system_flops(self, length: int, chunk: int) -> int:
        return 0


class Diagonal(System):
    """The system with log A_d, B_d and C, each (width, state / 2)."""

    def __init__(self, log: Tensor, b: Tensor, c: Tensor):
        self.log, self.b, self.c = log, b, c
        self.row = flat(2 * c.conj())

    def once(self, z: Tensor, u: Tensor) -> Tensor:
        return flat(self.log.exp() * pairs(z) + self.b * u[..., None])

    def writes(self, count: int) -> Tensor:
        return flat(self.b[:, None] * self._powers(count, 0, 1))

    def reads(self, count: int, first: int, stride: int) -> Tensor:
        return flat((2 * self.c[:, None] * self._powers(count, first, stride)).conj())

    def advance(self, z: Tensor, lengths: Tensor, most: int) -> Tensor:
        return flat((self.log * lengths[:, None, None]).exp() * pairs(z))

    def _powers(self, count: int, first: int, stride: int) -> Tensor:
        at = first + stride * torch.arange(count, device=self.log.device)
        return (self.log[:, None] * at[:, None]).exp()  # (width, count, state / 2)
