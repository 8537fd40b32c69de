"""The base of state-space mixers: a linear system for every channel, as a convolution and as a recurrence.

    z' = A z + B u,                y = C z + D u             in time
    z_t = A_d z_(t-1) + B_d u_t,   y_t = C z_t + D u_t       from position to position, dt apart: a recurrence
    y = K * u + D u,               K_l = C A_d^l B_d         the same unrolled: a convolution, by fast Fourier transform

States are complex and come in conjugate pairs, of which one half is kept: z is its real and imaginary parts in turn,
`state` real numbers for each channel. Gu et al. 2022, "Efficiently Modeling Long Sequences with Structured State
Spaces", arXiv:2111.00396. The matrix of HiPPO: Gu et al. 2020, arXiv:2008.07669.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, UserError
from regard.core.mixer import keep_rows
from regard.errors import nearest
from regard.ops.activation import activation as activate
from regard.ops.fading import accumulation_dtype

from .segments import pieces

CHUNK = 64  # positions of a step that are processed together
OUTS = ("glu", "linear", "none")


class Hidden(NamedTuple):
    z: Tensor  # (batch, width, state)


class System(ABC):
    """A discretized system. row: (width, state), the C above as it acts on z."""

    row: Tensor

    @abstractmethod
    def once(self, z: Tensor, u: Tensor) -> Tensor:
        """z (batch, width, state), u (batch, width) -> A_d z + B_d u"""

    @abstractmethod
    def writes(self, count: int) -> Tensor:
        """(width, count, state): A_d^j B_d, j from 0 on."""

    @abstractmethod
    def reads(self, count: int, first: int, stride: int) -> Tensor:
        """(width, count, state): C A_d^(first + j stride), j from 0 on."""

    @abstractmethod
    def advance(self, z: Tensor, lengths: Tensor, most: int) -> Tensor:
        """z (batch, width, state), lengths (batch,) of at most `most` -> A_d^lengths z"""


class StateSpace(Mixer[Hidden]):
    """A system for each channel, an activation, and a linear map. Subclasses define A, B and C.

    state:            real numbers in the state of each channel; even.
    shortest, longest: the time between two positions is drawn between them, on a logarithmic scale.
    activation:       after the system.
    out:              the map after that: "glu" (to twice the width, half of which gates the other), "linear" or "none".
    """

    def __init__(self, width: int, state: int, shortest: float, longest: float, activation: str, out: str):
        super().__init__()
        if state < 2 or state % 2:
            raise UserError(f"state must be even and at least 2, since it is complex and comes in pairs, not {state}")
        if not 0 < shortest <= longest:
            raise UserError(f"the times must be above 0, the shortest first, not {shortest} and {longest}")
        if out not in OUTS:
            raise UserError(f"unknown out '{out}'{nearest(out, OUTS)}")
        self.width, self.state, half = width, state, state // 2
        low, high = math.log(shortest), math.log(longest)
        self.log_dt = nn.Parameter(low + (high - low) * torch.rand(width))
        self.log_real = nn.Parameter(torch.empty(width, half).fill_(math.log(0.5)))  # A = -exp(log_real) + i imag
        self.imag = nn.Parameter(torch.empty(width, half))
        self.b = nn.Parameter(torch.empty(width, half, 2))
        self.c = nn.Parameter(torch.randn(width, half, 2) * 0.5**0.5)
        self.skip = nn.Parameter(torch.randn(width))
        for parameter in (self.log_real, self.imag, self.b, self.c):
            parameter.decays = False  # type: ignore[attr-defined]
        self.activate = activate(activation)
        self.gated = out == "glu"
        self.out = nn.Identity() if out == "none" else nn.Linear(width, 2 * width if self.gated else width)

    @abstractmethod
    def system(self) -> System:
        """Return the discretized system, at least in float32."""

    @abstractmethod
    def system_flops(self, length: int, chunk: int) -> int:
        """Of making the system's `writes` and `reads` for `chunk` positions, and of advancing `length` of them."""

    @property
    def exact(self) -> torch.dtype:
        return accumulation_dtype(self.log_dt.dtype)

    @property
    def poles(self) -> Tensor:
        """(width, state / 2), the diagonal of A"""
        return torch.complex(-self.log_real.to(self.exact).exp(), self.imag.to(self.exact))

    def start(self, context: Context, capacity: int) -> Hidden:
        batch = context.positions.shape[0]
        return Hidden(self.c.new_zeros(batch, self.width, self.state, dtype=self.exact))

    def step(self, x: Tensor, state: Hidden, context: Context) -> tuple[Tensor, Hidden]:
        with torch.autocast(x.device.type, enabled=False):
            u, system = _real(x.to(self.exact), context), self.system()
            if x.shape[1] == 1:
                z = keep_rows(context, system.once(state.z, u[:, 0]), state.z)
                y = (z * system.row).sum(-1)[:, None]
            else:
                y, z = self._chunks(u, state.z, system, context)
            y = y + self.skip.to(u.dtype) * u
        return self._leave(y.to(x.dtype)), Hidden(z)

    def _chunks(self, u: Tensor, z: Tensor, system: System, context: Context) -> tuple[Tensor, Tensor]:
        most = min(u.shape[1], CHUNK)
        writes, reads = system.writes(most), system.reads(most, 1, 1)
        kernel, outputs = (writes * system.row[:, None]).sum(-1), []
        for some, within in pieces(u, context, CHUNK):
            count = some.shape[1]
            old = reads[:, :count] @ z.permute(1, 2, 0)  # (width, count, batch)
            outputs.append(convolve(some, kernel[:, :count]) + old.permute(2, 1, 0))
            new = writes[:, :count].mT @ _latest(some, within).permute(2, 1, 0)  # (width, state, batch)
            z = system.advance(z, within.lengths, count) + new.permute(2, 0, 1)
        return torch.cat(outputs, 1), z

    def forward(self, x: Tensor, context: Context) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            u = _real(x.to(self.exact), context)
            y = convolve(u, self.kernel(x.shape[1])) + self.skip.to(u.dtype) * u
        return self._leave(y.to(x.dtype))

    def kernel(self, time: int) -> Tensor:
        """(width, time), the K above. Its index is split in two, so that no more than sqrt(time) powers are needed."""
        system, size = self.system(), 1 << (time.bit_length() + 1) // 2
        return (system.reads(-(-time // size), 0, size) @ system.writes(size).mT).flatten(1)[:, :time]

    def _leave(self, y: Tensor) -> Tensor:
        y = self.out(self.activate(y))
        return F.glu(y) if self.gated else y

    def cost(self, length: int, past: int = 0) -> Cost:
        flops = 2 * length * self.out.weight.numel() if isinstance(self.out, nn.Linear) else 0
        if length > 1:
            flops += 4 * length * self.width * self.state + self.system_flops(length, min(length, CHUNK))
        return Cost(flops, self.width * self.state * self.exact.itemsize)

    def growth(self) -> Growth:
        return Growth("n·log n·d + n·d²", "log n", "1")

    def value_path(self) -> Iterator[Tensor]:
        if isinstance(self.out, nn.Linear):
            yield self.out.weight


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """u (batch, time, width), kernel (width, time): every position and those before it."""
    time = u.shape[1]
    spectrum = torch.fft.rfft(u, 2 * time, 1) * torch.fft.rfft(kernel, 2 * time, 1).T
    return torch.fft.irfft(spectrum, 2 * time, 1)[:, :time]


def hippo(state: int) -> tuple[Tensor, Tensor, Tensor]:
    """The matrix of HiPPO-LegS in a basis where it is diagonal but for a rank of one, A = -1/2 + i imag - p p^*:
    imag, p and b of one half of the pairs (state / 2,), in double precision."""
    n = torch.arange(state, dtype=torch.float64, device="cpu")
    b, p = (2 * n + 1).sqrt(), (n + 0.5).sqrt()
    matrix = -(b[:, None] * b).tril(-1) - torch.diag(n + 1)
    skew = matrix + p[:, None] * p + 0.5 * torch.eye(state, dtype=torch.float64, device="cpu")
    imag, basis = torch.linalg.eigh(-1j * skew)
    imag, basis = imag[state // 2 :], basis[:, state // 2 :].mH
    return imag, basis @ p.to(basis.dtype), basis @ b.to(basis.dtype)


def pairs(z: Tensor) -> Tensor:
    """(..., state) real -> (..., state / 2) complex"""
    return torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous())


def flat(z: Tensor) -> Tensor:
    """(..., state / 2) complex -> (..., state) real"""
    return torch.view_as_real(z.resolve_conj()).flatten(-2)


def _real(u: Tensor, context: Context) -> Tensor:
    return u if context.valid is None else u.masked_fill(~context.valid[..., None], 0.0)


def _latest(u: Tensor, context: Context) -> Tensor:
    """u (batch, time, width), where columns that are not real are 0 -> the last real one of each row first, then those
    before it, then zeros."""
    if context.valid is None:
        return u.flip(1)
    at = context.lengths[:, None] - 1 - torch.arange(u.shape[1], device=u.device)  # (batch, time)
    return u.gather(1, (at % u.shape[1])[..., None].expand_as(u))
