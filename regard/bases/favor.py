"""FAVOR+: attention by positive random features, so that the sum over keys is computed once for all queries.

    softmax:  f(x) = exp(w_i x' - |x'|²/2 - top) + eps,     E[f(q) f(k)] ~ exp(q k / sqrt(dim))      x' = x / dim^(1/4)
    relu:     f(x) = relu(w_i x') + eps
    o_t = f(q_t) S / f(q_t) z,            S = sum of f(k_s) v_s^T,  z = sum of f(k_s), over s <= t, or over all s

The w_i are Gaussian vectors, those of a block of `dim` at right angles to one another. `top` keeps exponents below 0:
for a query its own largest w_i q', for keys the largest so far, and the sums fade as it grows, so that it cancels and
the future has no part in it. Choromanski et al. 2021, "Rethinking Attention with Performers", arXiv:2009.14794.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import UserError, nearest
from regard.native import private
from regard.ops.fading import accumulation_dtype, empty_memory, gated_linear_attention, with_ones

EPS = {"softmax": 1e-4, "relu": 1e-3}


class Seen(NamedTuple):
    matrix: Tensor  # (batch, heads, features, dim + 1), the S above and z beside it
    top: Tensor | None  # (batch, heads) the largest w_i k' so far, for the features of softmax


class Favor(nn.Module):
    """features: random vectors. kind: "softmax" or "relu". eps: None for the original's.
    seed, layer: of the draw; every layer has one of its own.
    redraw:      in training, draw anew at every so many calls; 0: never.
    """

    def __init__(self, dim: int, features: int, kind: str, eps: float | None, seed: int, layer: int, redraw: int):
        super().__init__()
        if kind not in EPS:
            raise UserError(f"unknown feature '{kind}'{nearest(kind, EPS)}")
        if features < 1 or redraw < 0:
            raise UserError(f"features must be at least 1, and redraw at least 0, not {features} and {redraw}")
        self.dim, self.features, self.kind, self.redraw = dim, features, kind, redraw
        self.seed = (seed, layer)
        self.eps = EPS[kind] if eps is None else eps
        if self.eps < 0:
            raise UserError(f"eps must be at least 0, not {eps}")
        self.register_buffer("vectors", torch.empty(features, dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.vectors: Tensor
        self.calls: Tensor
        self.vectors.copy_(orthogonal(features, dim, (*self.seed, 0)))

    def renew(self) -> None:
        """Count a training call, and redraw the vectors when due; not when a call is repeated in the backward pass."""
        if not self.redraw or not self.training or private.is_in_backward():
            return
        calls = int(self.calls)
        if calls and calls % self.redraw == 0:  # not in place: an earlier graph may need the old ones
            new = orthogonal(self.features, self.dim, (*self.seed, calls // self.redraw))
            self.vectors = new.to(self.vectors)
        self.calls += 1

    def recall(self, q: Tensor, k: Tensor, v: Tensor, state: Seen, valid: Tensor | None = None) -> tuple[Tensor, Seen]:
        """Causal attention: q, k, v (batch, heads, time, dim) -> the same shape, and the state."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, values = (t.to(accumulation_dtype(t.dtype)) for t in (q, k, v))
            k, size = self.project(k)
            if state.top is None:
                decay, top, k = None, None, F.relu(k) + self.eps
            else:
                tops = self._tops(k, state.top.to(k.dtype), valid)  # (batch, heads, time + 1)
                decay, top = (tops[..., :-1] - tops[..., 1:])[..., None], tops[..., -1]
                k = _exp_below(k - size - tops[..., 1:, None]) + self.eps
            y, matrix = gated_linear_attention(self.queries(q), k, with_ones(values), decay, state.matrix, valid)
        return normalize(y).to(v.dtype), Seen(matrix, top)

    def everything(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None) -> Tensor:
        """Attention over the whole sequence."""
        with torch.autocast(q.device.type, enabled=False):
            q, k, values = (t.to(accumulation_dtype(t.dtype)) for t in (q, k, v))
            k, size = self.project(k)
            if self.kind == "relu":
                k = F.relu(k) + self.eps
            else:
                low = k.new_full(k.shape[:2], torch.finfo(k.dtype).min / 4)
                k = _exp_below(k - size - self._tops(k, low, valid)[..., -1:, None]) + self.eps
            if valid is not None:
                k = k.masked_fill(~valid[:, None, :, None], 0.0)
            return normalize(self.queries(q) @ (k.mT @ with_ones(values))).to(v.dtype)

    def queries(self, q: Tensor) -> Tensor:
        """(batch, heads, time, features)"""
        q, size = self.project(q)
        if self.kind == "relu":
            return F.relu(q) + self.eps
        return (q - size - q.detach().amax(-1, keepdim=True)).exp() + self.eps

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """w_i x' (batch, heads, time, features), and |x'|²/2 (batch, heads, time, 1)"""
        x = x * self.dim**-0.25
        return x @ self.vectors.to(x.dtype).T, x.square().sum(-1, keepdim=True) / 2

    def _tops(self, k: Tensor, before: Tensor, valid: Tensor | None) -> Tensor:
        """Return the running maximum before each column and after the last."""
        tops = k.detach().amax(-1)  # (batch, heads, time)
        if valid is not None:
            tops = torch.where(valid[:, None], tops, before[..., None])
        return torch.cat((before[..., None], tops), -1).cummax(-1).values

    def start(self, like: Tensor) -> Seen:
        """like: (batch, heads), of the dtype of the queries"""
        matrix = empty_memory(like, self.features, self.dim + 1)
        low = torch.full_like(matrix[..., 0, 0], torch.finfo(matrix.dtype).min / 4)
        return Seen(matrix, low if self.kind == "softmax" else None)


def _exp_below(x: Tensor) -> Tensor:
    """Return exp(min(x, 0)), so that padding cannot overflow."""
    return x.clamp(max=0).exp()


def normalize(y: Tensor) -> Tensor:
    """Divide by the last channel: (..., dim + 1) -> (..., dim), 0 where that is 0."""
    weights = y[..., -1:]
    return y[..., :-1] / weights.masked_fill(weights == 0, 1.0)


def orthogonal(features: int, dim: int, seed: tuple[int, int, int]) -> Tensor:
    """(features, dim): Gaussian vectors, those of each block of `dim` at right angles."""
    first, layer, count = seed
    draw = torch.Generator().manual_seed((first * 8191 + layer) * 131071 + count)
    square = torch.randn(-(-features // dim), dim, dim, generator=draw, device="cpu")
    directions, upper = torch.linalg.qr(square)
    directions = directions * upper.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # now any rotation is as likely
    lengths = torch.randn(features, dim, generator=draw, device="cpu").norm(dim=1, keepdim=True)
    return directions.mT.flatten(0, 1)[:features] * lengths
