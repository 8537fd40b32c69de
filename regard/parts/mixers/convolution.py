"""Convolution: the output of a position is a weighted sum of its neighbors, with weights that depend on the distance.

    u   = W_in x, or gated: (A x) * sigmoid(B x)
    v_t = sum over k of  w_k * u_(t+k)                        the last `size` positions, or as many around t
    y   = W_out v

depthwise    one kernel w per channel
lightweight  one kernel per head, normalized by a softmax: Wu et al. 2019, arXiv:1901.10430
dynamic      like lightweight, but predicted from u_t at every position: Wu et al. 2019
gated        w_k are matrices to twice the width, half of which gates the other: Gehring et al. 2017, arXiv:1705.03122
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, UserError
from regard.errors import nearest

KINDS = ("depthwise", "lightweight", "dynamic", "gated")
MAPS = ("glu", "linear", "none")


class Recent(NamedTuple):
    """The last inputs of the kernel."""

    inputs: Tensor  # (batch, size - 1, width), oldest first, zeros before the start


class Convolution(Mixer[Recent]):
    """A convolution between two projections.

    kind:           depthwise, lightweight, dynamic or gated, as above.
    size:           kernel size.
    heads:          number of kernels of the lightweight and the dynamic kind, each shared by width / heads channels.
    causal:         see earlier positions only; otherwise both sides, and the whole sequence is needed at once.
    into:           input projection: "glu" (to twice the width, half of which gates the other), "linear" or "none".
    out:            there is an output projection.
    bias:           the two projections have a bias. A gated kernel always has one, the others never.
    softmax:        kernels of the lightweight and the dynamic kind are normalized by a softmax.
    kernel_dropout: dropout on the weights of these kernels.
    """

    examples = (
        {"kind": "dynamic", "size": 4},
        {"kind": "lightweight", "size": 3, "into": "linear", "softmax": False, "bias": False},
        {"kind": "depthwise", "size": 5, "into": "none", "out": False},
        {"kind": "gated", "size": 3, "into": "none", "out": False},
        {"kind": "lightweight", "size": 1},
        {"kind": "dynamic", "size": 5, "causal": False},
        {"kind": "lightweight", "size": 4, "causal": False},
        {"kind": "gated", "size": 4, "causal": False, "into": "none"},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        kind: str = "lightweight",
        size: int = 7,
        causal: bool = True,
        into: str = "glu",
        out: bool = True,
        bias: bool = True,
        softmax: bool = True,
        kernel_dropout: float = 0.0,
    ):
        super().__init__()
        if kind not in KINDS:
            raise UserError(f"unknown kind '{kind}'{nearest(kind, KINDS)}")
        if into not in MAPS:
            raise UserError(f"unknown into '{into}'{nearest(into, MAPS)}")
        if size < 1:
            raise UserError(f"size must be at least 1, not {size}")
        if kind in ("lightweight", "dynamic") and width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads: change one")
        self.width, self.heads, self.kind, self.size, self.causal = width, heads, kind, size, causal
        self.softmax, self.kernel_dropout = softmax, kernel_dropout
        self.into = nn.Linear(width, width * (2 if into == "glu" else 1), bias=bias) if into != "none" else None
        self.gate = into == "glu"
        self.kernel: nn.Module = {
            "depthwise": lambda: nn.Conv1d(width, width, size, groups=width, bias=False),
            "lightweight": lambda: Kernel(heads, size),
            "dynamic": lambda: nn.Linear(width, heads * size, bias=False),
            "gated": lambda: nn.Conv1d(width, 2 * width, size),
        }[kind]()
        self.out = nn.Linear(width, width, bias=bias) if out else None
        for linear in (self.into, self.out, self.kernel):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def start(self, context: Context, capacity: int) -> Recent:
        batch, device = context.positions.shape[0], context.positions.device
        return Recent(torch.zeros(batch, self.size - 1, self.width, dtype=self.dtype, device=device))

    def step(self, x: Tensor, state: Recent, context: Context) -> tuple[Tensor, Recent]:
        if not self.causal:
            raise UserError("a convolution over both sides needs the whole sequence at once, so it does not step")
        u = self._project_in(x)
        padded = torch.cat((state.inputs, u), 1)  # (batch, size - 1 + time, width)
        newest = context.lengths[:, None] + torch.arange(
            self.size - 1, device=x.device
        )  # the last valid ones of each row
        recent = padded.gather(1, newest[..., None].expand(-1, -1, self.width))
        return self._project_out(self._convolve(padded, u)), Recent(recent)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        u = self._project_in(x)
        if context.valid is not None:
            u = u.masked_fill(~context.valid[..., None], 0.0)
        before = self.size - 1 if self.causal else (self.size - 1) // 2
        return self._project_out(self._convolve(F.pad(u, (0, 0, before, self.size - 1 - before)), u))

    def _project_in(self, x: Tensor) -> Tensor:
        u = self.into(x) if self.into else x
        return F.glu(u) if self.gate else u

    def _project_out(self, v: Tensor) -> Tensor:
        return self.out(v) if self.out else v

    def _convolve(self, padded: Tensor, u: Tensor) -> Tensor:
        """Convolve `padded` (batch, size - 1 + time, width) to (batch, time, width). Dynamic kernels come from u
        (batch, time, width)."""
        if self.kind == "dynamic":
            kernels = self._weights(self.kernel(u).unflatten(-1, (self.heads, self.size)))
            windows = padded.unfold(1, self.size, 1).unflatten(2, (self.heads, -1))  # (batch, time, heads, dim, size)
            return (windows @ kernels[..., None]).flatten(2)
        if self.kind == "lightweight":
            kernels = self._weights(self.kernel.weight).repeat_interleave(self.width // self.heads, 0)
            return F.conv1d(padded.mT, kernels, groups=self.width).mT
        v = self.kernel(padded.mT).mT
        return F.glu(v) if self.kind == "gated" else v

    def _weights(self, kernels: Tensor) -> Tensor:
        kernels = kernels.softmax(-1) if self.softmax else kernels
        return F.dropout(kernels, self.kernel_dropout, self.training)

    def cost(self, length: int, past: int = 0) -> Cost:
        maps = [m for m in (self.into, self.out, self.kernel) if isinstance(m, nn.Linear)]
        each = sum(m.weight.numel() for m in maps)
        each += self.size * self.width * (2 * self.width if self.kind == "gated" else 1)
        size = self.dtype.itemsize
        return Cost(2 * length * each, (self.size - 1) * self.width * size if self.causal else 0)

    def growth(self) -> Growth:
        """Kernels are contiguous, so the longest path is n/k layers; the log_k(n) of Table 1 is for dilated kernels."""
        maps = " + n·d²" if self.into or self.out else ""
        return Growth(f"{self.size}·n·d²" if self.kind == "gated" else f"{self.size}·n·d{maps}", "1", f"n/{self.size}")

    def value_path(self) -> Iterator[Tensor]:
        yield from (m.weight for m in (self.into, self.out) if m)
        if self.kind == "gated":
            yield self.kernel.weight  # type: ignore[misc]


class Kernel(nn.Module):
    """A kernel (heads, 1, size)."""

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, 1, size)))
