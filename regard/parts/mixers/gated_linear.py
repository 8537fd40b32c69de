"""Gated linear attention: a matrix memory whose key channels decay at rates that depend on the input.

    S_t = diag(a_t) S_(t-1) + k_t v_t^T       a_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature), W_2 W_1 of low rank
    o_t = q_t S_t / sqrt(dim)
    y   = W_o (silu(W_g x) * norm(o))         each head normalized by itself

Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Growth, Mixer, Norm, UserError, part
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


class GatedLinear(Mixer[Summary]):
    """dim:      channels of a query and a key; None: half of width / heads.
    value_dim:   channels of a value; None: width / heads.
    rank:        rank of the projection to the gates.
    temperature: how slowly the memory decays: the gates are raised to the power of 1 / temperature.
    head_norm:   norm on the output of each head.
    """

    examples = ({}, {"dim": 5, "value_dim": 7, "rank": 2, "temperature": 0.1, "head_norm": "layer"})

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        value_dim: int | None = None,
        rank: int = 16,
        temperature: float = 16.0,
        head_norm: Norm | str | dict = "rms",
    ):
        super().__init__()
        if rank < 1 or temperature <= 0:
            raise UserError(f"rank must be at least 1 and temperature above 0, not {rank} and {temperature}")
        self.width, self.heads, self.temperature = width, heads, temperature
        self.dim = dim or max(head_dim(width, heads) // 2, 1)
        self.value_dim = value_dim or head_dim(width, heads)
        self.q, self.k = (nn.Linear(width, heads * self.dim, bias=False) for _ in range(2))
        self.v, self.gate = (nn.Linear(width, heads * self.value_dim, bias=False) for _ in range(2))
        self.narrow, self.fade = nn.Linear(width, rank, bias=False), nn.Linear(rank, heads * self.dim)
        self.out = nn.Linear(heads * self.value_dim, width, bias=False)
        self.head_norm = part(Norm, head_norm, width=self.value_dim)
        for linear in (self.q, self.k, self.v, self.gate, self.narrow, self.fade):
            nn.init.xavier_uniform_(linear.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out.weight)
        nn.init.zeros_(self.fade.bias)

    def start(self, context: Context, capacity: int) -> Summary:
        like = torch.empty(context.positions.shape[0], self.heads, dtype=self.dtype, device=context.positions.device)
        return Summary(empty_memory(like, self.dim, self.value_dim))

    def step(self, x: Tensor, state: Summary, context: Context) -> tuple[Tensor, Summary]:
        q, k, v = (split_heads(to(x), self.heads) for to in (self.q, self.k, self.v))
        gates = split_heads(self.fade(self.narrow(x)), self.heads)  # (batch, heads, time, dim)
        decay = F.logsigmoid(gates.to(accumulation_dtype(gates.dtype))) / self.temperature
        y, matrix = gated_linear_attention(q * self.dim**-0.5, k, v, decay, state.matrix, context.valid)
        y = self.head_norm(y.transpose(1, 2).to(self.dtype)).flatten(-2)
        return self.out(F.silu(self.gate(x)) * y), Summary(matrix)

    def cost(self, length: int, past: int = 0) -> Cost:
        linears = (self.q, self.k, self.v, self.gate, self.narrow, self.fade, self.out)
        projections = sum(m.weight.numel() for m in linears)
        products = flops(length, self.heads, self.dim, self.value_dim, channels=True)
        kept = self.heads * self.dim * self.value_dim * accumulation_dtype(self.dtype).itemsize
        return Cost(2 * length * projections + products, kept)

    def growth(self) -> Growth:
        return Growth(f"n·{self.dim}·d", f"n/{CHUNK}", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
