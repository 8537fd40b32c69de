"""Convolution: every position takes a weighted sum of its neighbours, with weights that depend on the distance alone.

    u   = W_in x, perhaps gated: (A x) * sigmoid(B x)
    v_t = sum over k of  w_k * u_(t+k)                        the last `size` positions, or as many around t
    y   = W_out v

depthwise    a kernel w for each channel
lightweight  one for each head, normalised by a softmax: Wu et al. 2019, arXiv:1901.10430
dynamic      the same, but predicted from u_t at every position: Wu et al. 2019
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
    """What the kernel may still reach."""

    inputs: Tensor  # (batch, size - 1, width), the oldest first, zeros before the beginning


class Convolution(Mixer[Recent]):
    """A convolution between two maps.

    kind:           depthwise, lightweight, dynamic or gated, as above.
    size:           positions that a kernel covers.
    heads:          kernels of the lightweight and the dynamic kind, each shared by width / heads channels.
    causal:         look back only; else to both sides, and the whole sequence is needed at once.
    into:           the map before: "glu" (to twice the width, half of which gates the other), "linear" or "none".
    out:            a map after.
    bias:           of the two maps. A gated kernel always has one, the others never.
    softmax:        kernels of the lightweight and the dynamic kind sum to 1.
    kernel_dropout: of their weights, in training.
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
            raise UserError("a convolution to both sides needs the whole sequence at once, so it does not step")
        u = self._enter(x)
        reach = torch.cat((state.inputs, u), 1)  # (batch, size - 1 + time, width)
        newest = context.lengths[:, None] + torch.arange(self.size - 1, device=x.device)  # the last real ones of a row
        recent = reach.gather(1, newest[..., None].expand(-1, -1, self.width))
        return self._leave(self._convolve(reach, u)), Recent(recent)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        u = self._enter(x)
        if context.valid is not None:
            u = u.masked_fill(~context.valid[..., None], 0.0)
        before = self.size - 1 if self.causal else (self.size - 1) // 2
        return self._leave(self._convolve(F.pad(u, (0, 0, before, self.size - 1 - before)), u))

    def _enter(self, x: Tensor) -> Tensor:
        u = self.into(x) if self.into else x
        return F.glu(u) if self.gate else u

    def _leave(self, v: Tensor) -> Tensor:
        return self.out(v) if self.out else v

    def _convolve(self, reach: Tensor, u: Tensor) -> Tensor:
        """reach (batch, size - 1 + time, width) -> (batch, time, width); u (batch, time, width) predicts kernels."""
        if self.kind == "dynamic":
            kernels = self._weights(self.kernel(u).unflatten(-1, (self.heads, self.size)))
            seen = reach.unfold(1, self.size, 1).unflatten(2, (self.heads, -1))  # (batch, time, heads, dim, size)
            return (seen @ kernels[..., None]).flatten(2)
        if self.kind == "lightweight":
            kernels = self._weights(self.kernel.weight).repeat_interleave(self.width // self.heads, 0)
            return F.conv1d(reach.mT, kernels, groups=self.width).mT
        v = self.kernel(reach.mT).mT
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
        """The kernels are contiguous, so it takes n/k layers to cross; Table 1's log_k(n) is for dilated ones."""
        maps = " + n·d²" if self.into or self.out else ""
        return Growth(f"{self.size}·n·d²" if self.kind == "gated" else f"{self.size}·n·d{maps}", "1", f"n/{self.size}")

    def value_path(self) -> Iterator[Tensor]:
        yield from (m.weight for m in (self.into, self.out) if m)
        if self.kind == "gated":
            yield self.kernel.weight  # type: ignore[misc]


class Kernel(nn.Module):
    """(heads, 1, size)"""

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(heads, 1, size)))
