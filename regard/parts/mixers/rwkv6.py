"""RWKV-6's time mix: a matrix memory whose channels decay at rates that depend on the input, as does the mix with the
previous position.

    S_t = diag(exp(-exp(w_t))) S_(t-1) + k_t v_t^T              y = W_o (silu(g) * norm(o)), each head normalized by
    itself o_t = r_t (S_(t-1) + diag(u) k_t v_t^T)                     the current position has a bonus u

    r, k, v, g and w are projections of five mixtures, each with its own m, A and B:
    x_t + (x_(t-1) - x_t) * (m + B tanh(A (x_t + (x_(t-1) - x_t) * m_x)))

Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv:2404.05892.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.shift import shift
from regard.core import Context, Cost, Growth, Mixer, Norm, Place, UserError, part
from regard.ops.fading import (
    CHUNK,
    accumulation_dtype,
    empty_memory,
    flops,
    gated_linear_attention,
    head_dim,
    split_heads,
)

MIXTURES = 5  # mixtures with the previous position: for the decay, k, v, r and the gate, in this order


class Rwkv6State(NamedTuple):
    last: Tensor  # (batch, width) the previous vector
    matrix: Tensor  # (batch, heads, dim, dim)


class Rwkv6(Mixer[Rwkv6State]):
    """rank:     rank of the projection that computes the mixtures.
    decay_rank:  rank of the projection that computes the decay.
    eps:         epsilon of the norm of each head.
    """

    examples = ({}, {"rank": 3, "decay_rank": 2})

    def __init__(
        self,
        width: int,
        heads: int,
        rank: int = 32,
        decay_rank: int = 64,
        eps: float = 64e-5,
        depth: int = 1,
        place: Place | None = None,
    ):
        super().__init__()
        if rank < 1 or decay_rank < 1:
            raise UserError(f"rank and decay_rank must be at least 1, not {rank} and {decay_rank}")
        self.width, self.heads, self.rank, self.dim = width, heads, rank, head_dim(width, heads)
        self.r, self.k, self.v, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.norm = part(Norm, {"part": "group", "groups": heads, "eps": eps}, width=width)
        self.mix_first = nn.Parameter(torch.empty(width))
        self.mix = nn.Parameter(torch.empty(MIXTURES, width))
        self.mix_in = nn.Linear(width, MIXTURES * rank, bias=False)
        self.mix_out = nn.Parameter(torch.empty(MIXTURES, rank, width))
        self.decay = nn.Parameter(torch.empty(width))
        self.decay_in = nn.Linear(width, decay_rank, bias=False)
        self.decay_out = nn.Linear(decay_rank, width, bias=False)
        self.bonus = nn.Parameter(torch.empty(heads, self.dim))
        self.reset_parameters(place.index if place else 0, depth)

    @torch.no_grad()
    def reset_parameters(self, index: int, depth: int) -> None:
        """Initialize channels with different mixes, decays and bonuses. Deeper layers take less from the previous
        position and have more channels with slow decay."""
        depth_ratio, exponent = index / max(depth - 1, 1), 1 - index / depth
        channel = torch.arange(self.width)
        along, place = channel / self.width, channel / max(self.width - 1, 1)
        powers = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5])[:, None] * exponent
        more = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.0])[:, None] * depth_ratio
        self.mix_first.copy_(1 - along**exponent)
        self.mix.copy_(1 - along**powers - more)
        self.decay.copy_(-6 + 5 * place ** (0.7 + 1.3 * depth_ratio))
        self.bonus.copy_((depth_ratio * (1 - place) + 0.1 * ((channel + 1) % 3 - 1)).view_as(self.bonus))
        for weight in (self.mix_in.weight, self.decay_in.weight):
            nn.init.uniform_(weight, -1e-4, 1e-4)
        for weight in (self.mix_out, self.decay_out.weight):
            nn.init.uniform_(weight, -1e-2, 1e-2)

    def start(self, context: Context, capacity: int) -> Rwkv6State:
        batch, like = context.positions.shape[0], self.out.weight
        return Rwkv6State(
            like.new_zeros(batch, self.width), empty_memory(like.new_empty(batch, self.heads), self.dim, self.dim)
        )

    def step(self, x: Tensor, state: Rwkv6State, context: Context) -> tuple[Tensor, Rwkv6State]:
        before, last = shift(x, state.last.to(x.dtype), context)
        for_decay, for_k, for_v, for_r, for_gate = self.mixtures(x, before - x)
        r, k, v = (split_heads(t, self.heads) for t in (self.r(for_r), self.k(for_k), self.v(for_v)))
        w = self.decay + self.decay_out(torch.tanh(self.decay_in(for_decay)))
        decay = -split_heads(w.to(accumulation_dtype(w.dtype)), self.heads).exp()
        y, matrix = gated_linear_attention(r, k, v, decay, state.matrix, context.valid, self.bonus)
        y = self.norm(y.transpose(1, 2).flatten(-2).to(self.dtype), context.valid)
        return self.out(F.silu(self.gate(for_gate)) * y), Rwkv6State(last.to(state.last.dtype), matrix)

    def mixtures(self, x: Tensor, back: Tensor) -> tuple[Tensor, ...]:
        """Return five mixtures (batch, time, width) of x and the previous vectors, given `back` = previous - x."""
        low = torch.tanh(self.mix_in(x + back * self.mix_first)).unflatten(-1, (MIXTURES, self.rank))
        more = torch.einsum("btnr,nrw->nbtw", low, self.mix_out)
        return (x + back * (self.mix[:, None, None] + more)).unbind(0)

    def cost(self, length: int, past: int = 0) -> Cost:
        linears = (self.r, self.k, self.v, self.gate, self.out, self.mix_in, self.decay_in, self.decay_out)
        projections = sum(m.weight.numel() for m in linears) + self.mix_out.numel()
        products = flops(length, self.heads, self.dim, self.dim, channels=True)
        weight = self.out.weight
        kept = self.width * weight.element_size() + self.width * self.dim * accumulation_dtype(weight.dtype).itemsize
        return Cost(2 * length * projections + products, kept)

    def growth(self) -> Growth:
        return Growth(f"n·d² + n·{self.dim}·d", f"n/{CHUNK}", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
