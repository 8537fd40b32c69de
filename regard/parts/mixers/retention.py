"""Retention: linear attention whose weights decay with distance, so that a fixed-size memory replaces the cache.

    S_t = g S_(t-1) + k_t v_t^T
    o_t = q_t S_t / sqrt(dim) = sum over s <= t of  g^(t-s) (q_t . k_s) v_s / sqrt(dim)
    y   = W_o (silu(W_g x) * norm(o))                                    each head normalized by itself

The weights are divided by sqrt(1 + g + ... + g^t), and then by the absolute value of their sum where that is above 1;
the norm cancels both, except for its epsilon.
Sun et al. 2023, "Retentive Network", arXiv:2307.08621.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, Norm, Position, UserError, part
from regard.ops.fading import (
    CHUNK,
    Summary,
    accumulation_dtype,
    empty_memory,
    flops,
    gated_linear_attention,
    head_dim,
    split_heads,
    with_ones,
)
from regard.ops.rotary import constant
from regard.schema import name_of


class Retention(Mixer[Summary]):
    """Multi-scale retention: head h decays by g = 1 - 2^-(5 + h).

    dim:       channels of a query and a key; None: width / heads.
    value_dim: channels of a value; None: twice dim.
    position:  position that rotates queries and keys: rotary, xpos or none.
    head_norm: norm on the output of each head.
    """

    examples = (
        {},
        {"dim": 6, "value_dim": 5, "position": "xpos", "head_norm": "layer"},
        {"position": {"part": "rotary", "layout": "interleaved"}},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        value_dim: int | None = None,
        position: Position | str | dict = "rotary",
        head_norm: Norm | str | dict = {"part": "rms", "gain": False},  # noqa: B006
    ):
        super().__init__()
        self.width, self.heads = width, heads
        self.dim = dim or head_dim(width, heads)
        self.value_dim = value_dim or 2 * self.dim
        self.position = part(Position, position, width=width, heads=heads, dim=self.dim)
        if any(self.position.acts(place) for place in ("embed", "bias", "output_bias")):
            raise UserError(f"retention takes a position that rotates queries and keys, not '{name_of(self.position)}'")
        self.q, self.k = (nn.Linear(width, heads * self.dim, bias=False) for _ in range(2))
        self.v, self.gate = (nn.Linear(width, heads * self.value_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(heads * self.value_dim, width, bias=False)
        self.head_norm = part(Norm, head_norm, width=self.value_dim)
        self.log_decay = tuple(math.log1p(-(2.0 ** -(5 + head))) for head in range(heads))  # log g per head
        for linear in (self.q, self.k, self.v, self.gate):
            nn.init.xavier_uniform_(linear.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out.weight)

    def start(self, context: Context, capacity: int) -> Summary:
        like = torch.empty(context.positions.shape[0], self.heads, dtype=self.dtype, device=context.positions.device)
        return Summary(empty_memory(like, self.dim, self.value_dim + 1))

    def step(self, x: Tensor, state: Summary, context: Context) -> tuple[Tensor, Summary]:
        q, k, v = (split_heads(to(x), self.heads) for to in (self.q, self.k, self.v))
        at = context.positions[:1] if context.from_start else context.positions
        q, k = self.position.query(q, at), self.position.key(k, at)
        y, state = self.retain(q, k, v, at, state, context.valid)
        y = self.head_norm(y.transpose(1, 2).to(self.dtype)).flatten(-2)
        return self.out(F.silu(self.gate(x)) * y), state

    def retain(
        self, q: Tensor, k: Tensor, v: Tensor, at: Tensor, state: Summary, valid: Tensor | None
    ) -> tuple[Tensor, Summary]:
        """Return the output before the norm, (batch, heads, time, value_dim), and the state. A channel of ones in the
        values sums the weights."""
        q = q.to(accumulation_dtype(q.dtype)) * self.dim**-0.5
        log_decay = constant(self.log_decay, q.device)[:, None, None]  # (heads, 1, 1)
        y, matrix = gated_linear_attention(q, k, with_ones(v), log_decay, state.matrix, valid)
        total = ((at[:, None, :, None] + 1) * log_decay).expm1() / log_decay.expm1()  # 1 + g + ... + g^t
        y = y / total.sqrt().to(y.dtype)
        y = y[..., :-1] / y[..., -1:].detach().abs().clamp(min=1)
        return y, Summary(matrix)

    def cost(self, length: int, past: int = 0) -> Cost:
        projections = sum(m.weight.numel() for m in (self.q, self.k, self.v, self.gate, self.out))
        products = flops(length, self.heads, self.dim, self.value_dim + 1)
        kept = self.heads * self.dim * (self.value_dim + 1) * accumulation_dtype(self.dtype).itemsize
        return Cost(2 * length * projections + products, kept)

    def growth(self) -> Growth:
        return Growth(f"n·{self.dim}·d", f"n/{CHUNK}", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
