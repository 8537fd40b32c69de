"""FLASH, mixed chunk attention in a gated unit: exact within a chunk of C positions, linear between the chunks, so that
work grows with the length and the state does not.

    near_i = sum over j in the chunk of i of  relu(q_i . k_j / C + bias_ij)^2  v_j
    far_i  = q'_i . S,     S = sum over j in earlier chunks of  k'_j v_j^T / C        to both sides: all j, / n for / C
    y_i    = W_out (u_i * (near_i + far_i))                     u, v and all queries and keys as in `gau`

Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447. The chunks lie at fixed places: a state holds
the unfinished one, so that a sequence may be cut into steps anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bases.cache import write
from regard.bases.gated import ACTIVATIONS, Unit, position_for
from regard.bases.segments import pieces
from regard.core import Context, Cost, Dropout, Growth, Mixer, Place, Position, UserError
from regard.errors import nearest


class Chunk(NamedTuple):
    """The unfinished chunk, and what came before it. Sums are kept in single precision at least."""

    keys: Tensor  # (batch, chunk + 1, dim), each in the slot of its place in the chunk; the last takes what is not real
    values: Tensor  # (batch, chunk + 1, hidden)
    own: Tensor  # (batch, dim, hidden), the sum over the unfinished chunk
    past: Tensor  # (batch, dim, hidden), the sum over all chunks before it


class Flash(Mixer[Chunk]):
    """Gated attention with one head, near and far. It stands alone in a layer.

    hidden:         channels of values and gates; None: twice the width.
    dim:            channels of the base, of queries and of keys.
    chunk:          C above.
    causal:         look back only; else to both sides, and the whole sequence is needed at once.
    position:       turns queries and keys (rotary), or adds to the scores within a chunk (t5), or "both".
    weights:        what makes weights of the scores within a chunk: relu_squared or laplace.
    weight_dropout: of those weights, in training.
    """

    examples = (
        {"dim": 8, "chunk": 4},
        {"dim": 6, "hidden": 10, "chunk": 5, "bias": False, "position": "t5"},
        {"dim": 8, "chunk": 64, "position": "alibi"},
        {"dim": 8, "chunk": 1, "weights": "laplace"},
        {"dim": 8, "chunk": 4, "causal": False},
        {"dim": 8, "chunk": 64, "causal": False, "position": "none"},
    )

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        dim: int = 128,
        chunk: int = 256,
        causal: bool = True,
        position: Position | str | dict | None = None,
        weights: str = "relu_squared",
        bias: bool = True,
        weight_dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        if weights not in ACTIVATIONS:
            raise UserError(f"unknown weights '{weights}'{nearest(weights, ACTIVATIONS)}")
        if chunk < 1:
            raise UserError(f"chunk must be at least 1, not {chunk}")
        self.width, self.hidden, self.dim, self.chunk, self.causal = width, hidden or 2 * width, dim, chunk, causal
        usual = {"part": "both", "one": "rotary", "two": {"part": "t5", "bidirectional": not causal}}
        self.position = position_for(usual if position is None else position, place, width, dim)
        self.activate = ACTIVATIONS[weights]
        self.unit = Unit(width, self.hidden, dim, 4, bias)
        self.drop = Dropout(weight_dropout)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def start(self, context: Context, capacity: int) -> Chunk:
        batch, like = context.positions.shape[0], self.unit.out.weight
        keys, values = (like.new_zeros(batch, self.chunk + 1, channels) for channels in (self.dim, self.hidden))
        own, past = (like.new_zeros(batch, self.dim, self.hidden, dtype=_wide(like)) for _ in range(2))
        return Chunk(keys, values, own, past)

    def step(self, x: Tensor, state: Chunk, context: Context) -> tuple[Tensor, Chunk]:
        if not self.causal:
            raise UserError("chunk attention to both sides needs the whole sequence at once, so it does not step")
        if x.shape[1] <= self.chunk:
            return self._step(x, state, context)
        outputs = []
        for piece, within in pieces(x, context, self.chunk):  # so that no step ends more than one chunk
            y, state = self._step(piece, state, within)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def _step(self, x: Tensor, state: Chunk, context: Context) -> tuple[Tensor, Chunk]:
        at, size = context.positions, self.chunk
        values, gates, near_q, far_q, near_k, far_k = self._enter(x, at)
        real = torch.ones_like(at, dtype=torch.bool) if context.valid is None else context.valid
        first, inside = at[:, :1] // size, at[:, :1] % size  # the chunk in which a row stands, how much of it is there
        later = at // size > first  # (batch, n), columns of the chunk after it
        slots = torch.arange(size, device=x.device)
        key_at = torch.cat((first * size + slots, at), 1)  # (batch, chunk + n)
        there = torch.cat((slots < inside, real), 1)
        allowed = (key_at[:, None] <= at[..., None]) & (key_at[:, None] // size == at[..., None] // size)
        near = self._near(
            near_q, torch.cat((state.keys[:, :-1], near_k), 1), at, key_at, allowed & there[:, None]
        ) @ torch.cat((state.values[:, :-1], values), 1)
        far = far_q.to(state.past.dtype) @ state.past
        own, after = state.own + self._sum(far_k, values, real & ~later), torch.zeros_like(state.own)
        if x.shape[1] > 1:  # one column alone is never of the chunk after
            far = far + (far_q.to(own.dtype) @ own).masked_fill(~later[..., None], 0.0)
            after = self._sum(far_k, values, real & later)
        full = (inside[:, 0] + context.lengths >= size)[:, None, None]
        slot = torch.where(real, at % size, size)
        keys, stored = state.keys, state.values
        if bool((later | (inside == 0)).any()):  # a new chunk takes the slots of the last, and may be taken back
            keys, stored = keys.clone(), stored.clone()
        state = Chunk(
            write(keys, slot, near_k),
            write(stored, slot, values),
            torch.where(full, after, own),
            torch.where(full, state.past + own, state.past),
        )
        return self.unit.out(gates * (near + far.to(near.dtype))), state

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.causal and not context.from_start:
            return super().forward(x, context)
        time, size = x.shape[1], self.chunk
        at = context.positions[:1] if context.from_start else context.positions
        values, gates, *turned = self._enter(x, at)
        if context.valid is not None:
            values = values.masked_fill(~context.valid[..., None], 0.0)  # so that nobody takes anything from there
        values, near_q, far_q, near_k, far_k = (self._chunks(t) for t in (values, *turned))
        places = torch.arange(size if self.position.relative else values.shape[1] * size, device=x.device)
        places = places.view(-1, size)  # (chunks or 1, chunk)
        order = torch.arange(size, device=x.device)
        allowed = order[:, None] >= order if self.causal else None
        near = self._near(near_q, near_k, places, places, allowed) @ values
        wide = _wide(values)
        sums = far_k.to(wide).mT @ values.to(wide)  # (batch, chunks, dim, hidden)
        if self.causal:
            sums = F.pad(sums.cumsum(1)[:, :-1], (0, 0, 0, 0, 1, 0)) / size
        else:
            sums = sums.sum(1, keepdim=True) / context.lengths.clamp(min=1)[:, None, None, None]
        mixed = near + (far_q.to(wide) @ sums).to(near.dtype)
        return self.unit.out(gates * mixed.flatten(1, 2)[:, :time])

    def _enter(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Values and gates (batch, time, hidden); queries near and far, keys near and far (batch, time, dim)."""
        values, gates, (near_q, far_q, near_k, far_k) = self.unit.enter(x)
        near_q, far_q = (self.position.query(q[:, None], at)[:, 0] for q in (near_q, far_q))
        near_k, far_k = (self.position.key(k[:, None], at)[:, 0] for k in (near_k, far_k))
        return values, gates, near_q, far_q, near_k, far_k

    def _chunks(self, x: Tensor) -> Tensor:
        """(batch, time, channels) -> (batch, chunks, chunk, channels), zeros after the end."""
        return F.pad(x, (0, 0, 0, -x.shape[1] % self.chunk)).unflatten(1, (-1, self.chunk))

    def _near(self, q: Tensor, k: Tensor, query_at: Tensor, key_at: Tensor, allowed: Tensor | None) -> Tensor:
        """Weights (..., n, m) of q (..., n, dim) and k (..., m, dim), at places (rows, n) and (rows, m)."""
        scores = q @ k.mT / self.chunk
        bias = self.position.bias(query_at[:, None, :, None], key_at[:, None, None, :], q)
        weights = self.activate(scores if bias is None else scores + bias[:, 0])
        return self.drop(weights if allowed is None else weights.masked_fill(~allowed, 0.0))

    def _sum(self, keys: Tensor, values: Tensor, some: Tensor) -> Tensor:
        """(batch, dim, hidden) over the columns that are True in `some` (batch, n)."""
        wide = _wide(keys)
        return keys.masked_fill(~some[..., None], 0.0).to(wide).mT @ values.to(wide) / self.chunk

    def cost(self, length: int, past: int = 0) -> Cost:
        """A sequence from its beginning is taken in whole chunks, a step with the unfinished chunk before it."""
        near, far, size = self.dim + self.hidden, self.dim * self.hidden, self.chunk
        if not self.causal or (past == 0 and length > size):
            chunks = -(-length // size)
            flops = 2 * chunks * size * (size * near + 2 * far)
        else:
            steps = [size] * (length // size) + [length % size] * (length % size > 0)
            flops = sum(2 * n * ((size + n) * near + (4 if n > 1 else 2) * far) for n in steps)
        like = self.unit.out.weight
        kept = (size + 1) * near * like.element_size() + 2 * far * torch.finfo(_wide(like)).bits // 8
        return Cost(self.unit.flops * length + flops, kept if self.causal else 0)

    def growth(self) -> Growth:
        return Growth(f"n·({self.chunk} + {self.dim})·d", "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.unit.into.weight, self.unit.out.weight)


def _wide(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
