"""Gated retention: a matrix memory whose heads decay at rates that depend on the input.

    S_t = g_t S_(t-1) + k_t v_t^T              g_t = sigmoid(w_g x_t)^(1 / temperature), one for each head
    o_t = q_t S_t / sqrt(dim)
    y   = W_o (silu(W_s x) * norm(o))          each head normalized by itself

Sun et al. 2024, "You Only Cache Once", arXiv:2405.05254: retention with a decay that depends on the data.
"""

from __future__ import annotations

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
)
from regard.schema import name_of


class GatedRetention(Mixer[Summary]):
    """dim:      channels of a head; None: width / heads.
    temperature: how slowly the memory decays: the gates are raised to the power of 1 / temperature.
    position:    position that rotates queries and keys: rotary, xpos or none.
    head_norm:   norm on the output of each head.
    """

    examples = ({}, {"dim": 6, "temperature": 0.1, "position": "none", "head_norm": "layer"})

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        temperature: float = 16.0,
        position: Position | str | dict = "rotary",
        head_norm: Norm | str | dict = {"part": "rms", "gain": False},  # noqa: B006
    ):
        super().__init__()
        if temperature <= 0:
            raise UserError(f"temperature must be above 0, not {temperature}")
        self.width, self.heads, self.temperature = width, heads, temperature
        self.dim = dim or head_dim(width, heads)
        self.position = part(Position, position, width=width, heads=heads, dim=self.dim)
        if any(self.position.acts(place) for place in ("embed", "bias", "output_bias")):
            raise UserError(
                f"gated_retention takes a position that rotates queries and keys, not '{name_of(self.position)}'"
            )
        inner = heads * self.dim
        self.q, self.k, self.v, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(4))
        self.fade = nn.Linear(width, heads, bias=False)
        self.out = nn.Linear(inner, width, bias=False)
        self.head_norm = part(Norm, head_norm, width=self.dim)
        for linear in (self.q, self.k, self.v, self.gate, self.fade):
            nn.init.xavier_uniform_(linear.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out.weight)

    def start(self, context: Context, capacity: int) -> Summary:
        like = torch.empty(context.positions.shape[0], self.heads, dtype=self.dtype, device=context.positions.device)
        return Summary(empty_memory(like, self.dim, self.dim))

    def step(self, x: Tensor, state: Summary, context: Context) -> tuple[Tensor, Summary]:
        q, k, v = (split_heads(to(x), self.heads) for to in (self.q, self.k, self.v))
        at = context.positions[:1] if context.from_start else context.positions
        q, k = self.position.query(q, at), self.position.key(k, at)
        rate = self.fade(x)
        decay = F.logsigmoid(rate.to(accumulation_dtype(rate.dtype))) / self.temperature  # (batch, time, heads)
        y, matrix = gated_linear_attention(q * self.dim**-0.5, k, v, decay.mT[..., None], state.matrix, context.valid)
        y = self.head_norm(y.transpose(1, 2)).flatten(-2)
        return self.out(F.silu(self.gate(x)) * y), Summary(matrix)

    def cost(self, length: int, past: int = 0) -> Cost:
        projections = sum(m.weight.numel() for m in (self.q, self.k, self.v, self.gate, self.fade, self.out))
        kept = self.heads * self.dim * self.dim * accumulation_dtype(self.dtype).itemsize
        return Cost(2 * length * projections + flops(length, self.heads, self.dim, self.dim), kept)

    def growth(self) -> Growth:
        return Growth(f"n·{self.dim}·d", f"n/{CHUNK}", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
