"""Infini-attention: attention within a segment, plus a matrix memory per head of all segments before it.

    local    a_i = causal softmax attention among the positions of the segment
    memory   m_i = s(q_i) M / s(q_i) z                                      s(x) = elu(x) + 1
    output   o_i = g m_i + (1 - g) a_i                                      g = sigmoid(beta), one for each head
    then     M <- M + s(K)^T V,   z <- z + sum of s(K)                      update "linear"
             M <- M + s(K)^T (V - s(K) M / s(K) z), z likewise              update "delta"

Munkhdalai et al. 2024, "Leave No Context Behind", arXiv:2404.07143. In the first segment the memory is empty, m is 0/0
and the output is a alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases import Attend, AttentionMask
from regard.bases.cache import grow_slots, write
from regard.bases.segments import Turn, cut, join, turns
from regard.core import Context, Cost, Growth, Mixer, Pattern, Position, Score, UserError, part
from regard.ops.fading import accumulation_dtype, with_ones
from regard.pattern.analysis import pairs
from regard.schema import name_of

UPDATES = ("linear", "delta")
EPS = 1e-10  # smallest divisor
CAUSAL = Pattern.parse("causal")


class Past(NamedTuple):
    """The cache of the current segment, and the memory of all before it."""

    keys: Tensor  # (batch, slots + 1, heads, dim), before any position is applied; the last slot is for padding
    values: Tensor  # (batch, slots + 1, heads, dim)
    memory: Tensor  # (batch, heads, dim, dim + 1): M, with z as the last column; in float32 or better


class Infini(Mixer[Past]):
    """segment: positions in a segment.
    update:   how the memory is updated when a segment is full: "linear" or "delta".
    dim:      channels of a head; None: width / heads.
    position: position of the local attention, counted within the segment. The memory has no positions.
    bias:     the projections have a bias.
    """

    restarts = True
    examples = (
        {"segment": 5},
        {"segment": 4, "update": "delta", "position": "none", "dim": 6, "bias": True},
        {"segment": 64},
        {"segment": 1, "update": "delta"},
        {"segment": 7, "position": "alibi"},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        segment: int = 2048,
        update: str = "delta",
        dim: int | None = None,
        position: Position | str | dict = "rotary",
        bias: bool = False,
        weight_dropout: float = 0.0,
        kernel: str = "auto",
    ):
        super().__init__()
        if dim is None and width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads: change one, or give dim")
        if segment < 1:
            raise UserError(f"segment must be at least 1, not {segment}")
        if update not in UPDATES:
            raise UserError(f"update must be 'linear' or 'delta', not '{update}'")
        self.width, self.heads, self.segment, self.update = width, heads, segment, update
        self.dim = dim or width // heads
        self.position = part(Position, position, width=width, heads=heads, dim=self.dim)
        if self.position.acts("embed"):
            raise UserError(f"position '{name_of(self.position)}' acts on token vectors: name it in the embed")
        self.score = part(Score, "scaled_dot", dim=self.dim)
        inner = heads * self.dim
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=bias) for _ in range(3))
        self.out = nn.Linear(inner, width, bias=bias)
        self.beta = nn.Parameter(nn.init.zeros_(torch.empty(heads)))
        self.attend = Attend(kernel, weight_dropout)
        for linear in (self.q, self.k, self.v, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def start(self, context: Context, capacity: int) -> Past:
        batch, like = context.positions.shape[0], self.q.weight
        buffer = (batch, min(self.segment, capacity) + 1, self.heads, self.dim)
        memory = like.new_zeros(batch, self.heads, self.dim, self.dim + 1, dtype=accumulation_dtype(like.dtype))
        return Past(like.new_zeros(buffer), like.new_zeros(buffer), memory)

    def step(self, x: Tensor, state: Past, context: Context) -> tuple[Tensor, Past]:
        if context.pattern is not None:
            raise UserError("the memory holds all positions, so infini cannot follow a pattern given with the batch")
        q, k, v = (m(x).unflatten(-1, (self.heads, self.dim)) for m in (self.q, self.k, self.v))
        made, outputs = turns(context, self.segment), []
        for turn, *own in zip(made, *(cut(t, made) for t in (q, k, v)), strict=True):
            state = Past(grow_slots(state.keys, turn.end), grow_slots(state.values, turn.end), state.memory)
            full = (turn.count > 0) & (turn.begin >= self.segment) & (turn.inside == 0)
            if bool(full.any()):
                memory = torch.where(full[:, None, None, None], self.absorb(state), state.memory)
                state = Past(state.keys.clone(), state.values.clone(), memory)  # so that the step can be undone
            y, state = self._segment(*own, state, turn)
            outputs.append(y.transpose(1, 2).flatten(-2))
        return self.out(join(outputs, made, context)), state

    def _segment(self, q: Tensor, k: Tensor, v: Tensor, state: Past, turn: Turn) -> tuple[Tensor, Past]:
        """Process the next positions of a segment: q, k and v (batch, n, heads, dim) -> (batch, heads, n, dim)."""
        slot = torch.where(turn.valid, turn.at, state.keys.shape[1] - 1)
        state = Past(write(state.keys, slot, k), write(state.values, slot, v), state.memory)
        if not turn.opens:
            k, v = state.keys[:, : turn.end], state.values[:, : turn.end]
        at = torch.arange(k.shape[1], device=k.device)[None]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        ready = self.score.query(self.position.query(q, turn.at))
        plain = self.score.query(self.position.bias_query(q)) if self.position.needs_query else ready
        mask = AttentionMask(CAUSAL, turn.at, at, from_start=turn.opens)
        y = self.attend(ready, self.position.key(k, at), v, mask, self.score, self.position, plain)
        later = turn.begin >= self.segment  # (batch,) not the first segment
        if not bool(later.any()):
            return y, state
        share = torch.sigmoid(self.beta)[:, None, None] * later[:, None, None, None]
        return torch.lerp(y, self.recall(q, state.memory).to(y.dtype), share.to(y.dtype)), state

    def recall(self, q: Tensor, memory: Tensor) -> Tensor:
        """Return what the memory holds for q (batch, heads, n, dim), in the precision of the memory."""
        with torch.autocast(q.device.type, enabled=False):
            read = feature(q.to(memory.dtype)) @ memory
        return read[..., :-1] / read[..., -1:].clamp(min=EPS)

    def absorb(self, state: Past) -> Tensor:
        """Return the memory (batch, heads, dim, dim + 1) updated with a full segment."""
        k, v = (t[:, : self.segment].transpose(1, 2).to(state.memory.dtype) for t in state[:2])
        if self.update == "delta":
            v = v - self.recall(k, state.memory)
        with torch.autocast(k.device.type, enabled=False):
            return state.memory + feature(k).mT @ with_ones(v)

    def cost(self, length: int, past: int = 0) -> Cost:
        total, size = past + length, self.q.weight.element_size()
        inner, matrix = self.heads * self.dim, self.heads * self.dim * (self.dim + 1)
        attended = pairs(CAUSAL & Pattern.parse(f"block({self.segment})"), length, past)
        flops = 2 * length * 4 * self.width * inner + round(attended * 4 * inner)
        flops += self.position.flops(length, min(self.segment, total), attended)
        flops += 2 * matrix * max(total - max(past, self.segment), 0)  # the first segment has no memory
        full = (total - 1) // self.segment - (max(past, 1) - 1) // self.segment
        flops += 2 * matrix * full * self.segment * (2 if self.update == "delta" else 1)
        buffer = 2 * (min(self.segment, total) + 1) * inner * size
        return Cost(flops, buffer + matrix * max(size, 4))

    def growth(self) -> Growth:
        return Growth(f"n·({self.segment} + {self.dim})·d", f"n/{self.segment}", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)


def feature(x: Tensor) -> Tensor:
    return F.elu(x) + 1
