"""DeltaNet: linear attention with the delta rule. The value that the memory stores for a key is moved towards the new
value, instead of adding the new value.

    S_t = S_(t-1) + beta_t k_t (v_t - S_(t-1)^T k_t)^T          beta_t = sigmoid(w_b x_t), one per head
    o_t = q_t S_t                                               q, k: silu, then normalized; v: silu
    y   = W_o norm(o)                                           each head normalized by itself

Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers", arXiv:2102.11174; in this form Yang et
al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Cost, Empty, Growth, Mixer, Norm, UserError, part
from regard.ops.delta import delta, flops
from regard.ops.fading import CHUNK, accumulation_dtype, empty_memory, head_dim, split_heads


class DeltaState(NamedTuple):
    matrix: Tensor  # (batch, heads, dim, value_dim)
    near: Any  # state of the mixer `near`


class Delta(Mixer[DeltaState]):
    """dim:    channels of a query and a key; None: width / heads.
    value_dim: channels of a value; None: dim.
    near:      mixer that is applied to the concatenated queries, keys and values: in the paper, a depthwise convolution
               of size 4.
    head_norm: norm on the output of each head.
    """

    examples = (
        {},
        {
            "dim": 5,
            "value_dim": 7,
            "near": {"part": "convolution", "kind": "depthwise", "size": 4, "into": "none", "out": False},
            "head_norm": "layer",
        },
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        value_dim: int | None = None,
        near: Mixer | str | dict | None = None,
        head_norm: Norm | str | dict = "rms",
    ):
        super().__init__()
        self.width, self.heads = width, heads
        self.dim = dim or head_dim(width, heads)
        self.value_dim = value_dim or self.dim
        self.sizes = (heads * self.dim, heads * self.dim, heads * self.value_dim)
        self.into = nn.Linear(width, sum(self.sizes), bias=False)
        self.near = None if near is None else part(Mixer, near, width=sum(self.sizes), heads=heads)
        if self.near is not None and (not self.near.streams or self.near.out_width != sum(self.sizes)):
            raise UserError("near must be a mixer that streams and keeps its width, such as a causal convolution")
        self.beta = nn.Linear(width, heads, bias=False)
        self.out = nn.Linear(heads * self.value_dim, width, bias=False)
        self.head_norm = part(Norm, head_norm, width=self.value_dim)

    def start(self, context: Context, capacity: int) -> DeltaState:
        like = torch.empty(context.positions.shape[0], self.heads, dtype=self.dtype, device=context.positions.device)
        near = Empty() if self.near is None else self.near.start(context, capacity)
        return DeltaState(empty_memory(like, self.dim, self.value_dim), near)

    def step(self, x: Tensor, state: DeltaState, context: Context) -> tuple[Tensor, DeltaState]:
        qkv, near = self.into(x), state.near
        if self.near is not None:
            qkv, near = self.near.step(qkv, near, context)
        q, k, v = (split_heads(t, self.heads) for t in F.silu(qkv).split(self.sizes, -1))
        q, k = F.normalize(q, dim=-1, eps=1e-6), F.normalize(k, dim=-1, eps=1e-6)
        beta = torch.sigmoid(self.beta(x)).transpose(1, 2)  # (batch, heads, time)
        y, matrix = delta(q, k, v, beta, state.matrix, context.valid)
        y = self.head_norm(y.transpose(1, 2).to(self.dtype)).flatten(-2)
        return self.out(y), DeltaState(matrix, near)

    def cost(self, length: int, past: int = 0) -> Cost:
        projections = sum(m.weight.numel() for m in (self.into, self.beta, self.out))
        near = Cost(0, 0) if self.near is None else self.near.cost(length, past)
        kept = self.heads * self.dim * self.value_dim * accumulation_dtype(self.dtype).itemsize
        products = flops(length, self.heads, self.dim, self.value_dim)
        return Cost(2 * length * projections + products + near.flops, kept + near.state)

    def growth(self) -> Growth:
        return Growth(f"n·{self.dim}·d", f"n/{CHUNK}", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield self.into.weight[-self.sizes[-1] :]
        yield self.out.weight
