"""S4: a linear state space model per channel, initialized to remember its past as polynomial coefficients (HiPPO).

    A = diag(-exp(a) + i w) - p p^*                          normal plus low rank, initialized to HiPPO-LegS
    (2/dt - A) z_t = (2/dt + A) z_(t-1) + 2 B u_t            the bilinear rule
    y_t = 2 Re (C z_t) + D u_t

A step solves this in time linear in the state, by the Sherman-Morrison-Woodbury formula. For the convolution, powers of
A_d are computed by repeated squaring, which is stable since A_d is a contraction in this basis. C holds for every
length (the original stores C (1 - A_d^L), for one L).

Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State Spaces", arXiv:2111.00396.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.bases.state_space import CHUNK, StateSpace, System, flat, hippo, pairs


class S4(StateSpace):
    """state:          real state size per channel; even.
    shortest, longest: the time step dt is drawn between them, on a logarithmic scale.
    activation:        activation of the output.
    out:               output projection: "glu", "linear" or "none".
    """

    examples = ({"state": 16}, {"state": 6, "out": "linear", "activation": "silu"}, {"state": 2, "out": "none"})

    def __init__(
        self,
        width: int,
        state: int = 64,
        shortest: float = 0.001,
        longest: float = 0.1,
        activation: str = "gelu",
        out: str = "glu",
    ):
        super().__init__(width, state, shortest, longest, activation, out)
        self.p = nn.Parameter(torch.empty(width, state // 2, 2))
        self.p.decays = False  # type: ignore[attr-defined]
        imag, p, b = hippo(state)
        with torch.no_grad():
            self.imag.copy_(imag.expand(width, -1))
            self.p.copy_(torch.view_as_real(p).expand(width, -1, -1))
            self.b.copy_(torch.view_as_real(b).expand(width, -1, -1))

    def system(self) -> LowRank:
        rate = 2 * (-self.log_dt.to(self.exact)).exp()[:, None]
        b, c, p = (torch.view_as_complex(t.to(self.exact).contiguous()) for t in (self.b, self.c, self.p))
        return LowRank(self.poles, p, b, c, rate)

    def system_flops(self, length: int, chunk: int) -> int:
        squared, vectors = self.width * self.state**2, 2 * chunk - 1
        chunks = [min(CHUNK, length - begin) for begin in range(0, length, CHUNK)]
        steps = sum(count.bit_length() for count in chunks)
        return 2 * squared * ((chunk.bit_length() - 1) * self.state + vectors + steps)


class LowRank(System):
    """The system above with poles, p, b, c (width, state / 2) and rate (width, 1), the 2/dt."""

    def __init__(self, poles: Tensor, p: Tensor, b: Tensor, c: Tensor, rate: Tensor):
        self.poles, self.p, self.b, self.rate = poles, p, b, rate
        self.row = flat(2 * c.conj())
        self.inverse = 1 / (rate - poles)
        self.solved = self.inverse * p / (1 + inner(p, self.inverse * p))
        self._squares: list[Tensor] = []

    def once(self, z: Tensor, u: Tensor) -> Tensor:
        z = pairs(z)
        right = (self.rate + self.poles) * z - self.p * inner(self.p, z) + 2 * self.b * u[..., None]
        right = self.inverse * right
        return flat(right - self.solved * inner(self.p, right))

    def squares(self, count: int) -> list[Tensor]:
        """Return A_d^1, A_d^2, A_d^4, ... (at least `count`), each (width, state, state)."""
        if not self._squares:
            width, state = self.row.shape
            unit = torch.eye(state, dtype=self.row.dtype, device=self.row.device)[:, None].expand(-1, width, -1)
            self._squares.append(self.once(unit, unit.new_zeros(1, width)).permute(1, 2, 0))
        while len(self._squares) < count:
            self._squares.append(self._squares[-1] @ self._squares[-1])
        return self._squares

    def writes(self, count: int) -> Tensor:
        begin = self.once(torch.zeros_like(self.row)[None], self.row.new_ones(1, len(self.row)))
        return times_powers(begin.transpose(0, 1), [square.mT for square in self.squares(count.bit_length())], count)

    def reads(self, count: int, first: int, stride: int) -> Tensor:
        """See `System.reads`; `first` is 0 or 1, and `stride` a power of 2."""
        power = stride.bit_length() - 1
        squares = self.squares(power + count.bit_length())
        begin = self.row[:, None] @ squares[0] if first else self.row[:, None]
        return times_powers(begin, squares[power:], count)

    def advance(self, z: Tensor, lengths: Tensor, most: int) -> Tensor:
        for bit, square in enumerate(self.squares(most.bit_length())[: most.bit_length()]):
            further = (square @ z.permute(1, 2, 0)).permute(2, 0, 1)
            z = torch.where((lengths >> bit & 1).bool()[:, None, None], further, z)
        return z


def inner(p: Tensor, z: Tensor) -> Tensor:
    """Return p^* z over the conjugate pairs, real: (..., state / 2) -> (..., 1)."""
    return 2 * (p.conj() * z).real.sum(-1, keepdim=True)


def times_powers(begin: Tensor, squares: list[Tensor], count: int) -> Tensor:
    """Return begin (width, 1, state) times 1, M, M^2, ..., (width, count, state), given M, M^2, M^4, ... in
    `squares`."""
    made = begin
    for square in squares:
        if made.shape[1] < count:
            made = torch.cat((made, made[:, : count - made.shape[1]] @ square), 1)
    return made
