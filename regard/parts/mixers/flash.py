"""FLASH: a gated attention unit with mixed chunk attention, which is exact within a chunk of C positions and linear
across chunks, so that the cost is linear in the length and the state has a fixed size.

    near_i = sum over j in the chunk of i of  relu(q_i . k_j / C + bias_ij)^2  v_j
    far_i  = q'_i . S,     S = sum over j in earlier chunks of  k'_j v_j^T / C        if not causal: all j, and / n
    y_i    = W_out (u_i * (near_i + far_i))                     u, v and all queries and keys as in `gau`

Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447. Chunks begin at fixed positions, and the state
holds the unfinished one, so that a sequence may be cut into steps anywhere.
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
    """The unfinished chunk, and the sums over the chunks before it. Sums are in float32 or better."""

    keys: Tensor  # (batch, chunk + 1, dim), by position in the chunk; the last slot is for padding
    values: Tensor  # (batch, chunk + 1, hidden)
    own: Tensor  # (batch, dim, hidden), the sum over the unfinished chunk
    past: Tensor  # (batch, dim, hidden), the sum over all chunks before it


class Flash(Mixer[Chunk]):
    """Gated attention with one head. It replaces both attention and feed-forward in a layer.

    hidden:         channels of values and gates; None: twice the width.
    dim:            channels of the shared base, of queries and of keys.
    chunk:          C above.
    causal:         attend to earlier positions only; otherwise to both sides, and the whole sequence is needed at once.
    position:       position that rotates queries and keys (rotary), adds to the scores within a chunk (t5), or "both".
    weights:        what turns scores within a chunk into weights: relu_squared or laplace.
    weight_dropout: dropout on those weights.
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
        default = {"part": "both", "one": "rotary", "two": {"part": "t5", "bidirectional": not causal}}
        self.position = position_for(default if position is None else position, place, width, dim)
        self.activate = ACTIVATIONS[weights]
        self.unit = Unit(width, self.hidden, dim, 4, bias)
        self.drop = Dropout(weight_dropout)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.causal

    def start(self, context: Context, capacity: int) -> Chunk:
        batch, like = context.positions.shape[0], self.unit.out.weight
        keys, values = (like.new_zeros(batch, self.chunk + 1, channels) for channels in (self.dim, self.hidden))
        own, past = (like.new_zeros(batch, self.dim, self.hidden, dtype=_sum_dtype(like)) for _ in range(2))
        return Chunk(keys, values, own, past)

    def step(self, x: Tensor, state: Chunk, context: Context) -> tuple[Tensor, Chunk]:
        if not self.causal:
            raise UserError("chunk attention over both sides needs the whole sequence at once, so it does not step")
        if x.shape[1] <= self.chunk:
            return self._step(x, state, context)
        outputs = []
        for piece, within in pieces(x, context, self.chunk):  # so that no step completes more than one chunk
            y, state = self._step(piece, state, within)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def _step(self, x: Tensor, state: Chunk, context: Context) -> tuple[Tensor, Chunk]:
        at, size = context.positions, self.chunk
        values, gates, near_q, far_q, near_k, far_k = self._project(x, at)
        valid = torch.ones_like(at, dtype=torch.bool) if context.valid is None else context.valid
        first, inside = (
            at[:, :1] // size,
            at[:, :1] % size,
        )  # the current chunk of each row, and its number of positions
        later = at // size > first  # (batch, n), positions of the chunk after it
        slots = torch.arange(size, device=x.device)
        key_at = torch.cat((first * size + slots, at), 1)  # (batch, chunk + n)
        exists = torch.cat((slots < inside, valid), 1)
        allowed = (key_at[:, None] <= at[..., None]) & (key_at[:, None] // size == at[..., None] // size)
        near = self._weights(
            near_q, torch.cat((state.keys[:, :-1], near_k), 1), at, key_at, allowed & exists[:, None]
        ) @ torch.cat((state.values[:, :-1], values), 1)
        far = far_q.to(state.past.dtype) @ state.past
        own, after = state.own + self._sum(far_k, values, valid & ~later), torch.zeros_like(state.own)
        if x.shape[1] > 1:  # a single position is never in the chunk after
            far = far + (far_q.to(own.dtype) @ own).masked_fill(~later[..., None], 0.0)
            after = self._sum(far_k, values, valid & later)
        full = (inside[:, 0] + context.lengths >= size)[:, None, None]
        slot = torch.where(valid, at % size, size)
        keys, stored = state.keys, state.values
        if bool((later | (inside == 0)).any()):  # a new chunk reuses the slots, and the step may be undone
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
        values, gates, *queries_keys = self._project(x, at)
        if context.valid is not None:
            values = values.masked_fill(~context.valid[..., None], 0.0)  # so that padding adds nothing
        values, near_q, far_q, near_k, far_k = (self._chunks(t) for t in (values, *queries_keys))
        places = torch.arange(size if self.position.relative else values.shape[1] * size, device=x.device)
        places = places.view(-1, size)  # (chunks or 1, chunk)
        order = torch.arange(size, device=x.device)
        allowed = order[:, None] >= order if self.causal else None
        near = self._weights(near_q, near_k, places, places, allowed) @ values
        dtype = _sum_dtype(values)
        sums = far_k.to(dtype).mT @ values.to(dtype)  # (batch, chunks, dim, hidden)
        if self.causal:
            sums = F.pad(sums.cumsum(1)[:, :-1], (0, 0, 0, 0, 1, 0)) / size
        else:
            sums = sums.sum(1, keepdim=True) / context.lengths.clamp(min=1)[:, None, None, None]
        mixed = near + (far_q.to(dtype) @ sums).to(near.dtype)
        return self.unit.out(gates * mixed.flatten(1, 2)[:, :time])

    def _project(self, x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        """Return values and gates (batch, time, hidden), near and far queries, near and far keys (batch, time, dim)."""
        values, gates, (near_q, far_q, near_k, far_k) = self.unit.enter(x)
        near_q, far_q = (self.position.query(q[:, None], at)[:, 0] for q in (near_q, far_q))
        near_k, far_k = (self.position.key(k[:, None], at)[:, 0] for k in (near_k, far_k))
        return values, gates, near_q, far_q, near_k, far_k

    def _chunks(self, x: Tensor) -> Tensor:
        """Split x (batch, time, channels), padded with zeros, into (batch, chunks, chunk, channels)."""
        return F.pad(x, (0, 0, 0, -x.shape[1] % self.chunk)).unflatten(1, (-1, self.chunk))

    def _weights(self, q: Tensor, k: Tensor, query_at: Tensor, key_at: Tensor, allowed: Tensor | None) -> Tensor:
        """Return the weights (..., n, m) of q (..., n, dim) and k (..., m, dim), at positions (rows, n) and (rows,
        m)."""
        scores = q @ k.mT / self.chunk
        bias = self.position.bias(query_at[:, None, :, None], key_at[:, None, None, :], q)
        weights = self.activate(scores if bias is None else scores + bias[:, 0])
        return self.drop(weights if allowed is None else weights.masked_fill(~allowed, 0.0))

    def _sum(self, keys: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of k v^T / C, (batch, dim, hidden), over the positions that are True in `chosen` (batch,
        n)."""
        dtype = _sum_dtype(keys)
        return keys.masked_fill(~chosen[..., None], 0.0).to(dtype).mT @ values.to(dtype) / self.chunk

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count a sequence from the start in whole chunks, and a later step with the unfinished chunk before it."""
        near, far, size = self.dim + self.hidden, self.dim * self.hidden, self.chunk
        if not self.causal or (past == 0 and length > size):
            chunks = -(-length // size)
            flops = 2 * chunks * size * (size * near + 2 * far)
        else:
            steps = [size] * (length // size) + [length % size] * (length % size > 0)
            flops = sum(2 * n * ((size + n) * near + (4 if n > 1 else 2) * far) for n in steps)
        like = self.unit.out.weight
        kept = (size + 1) * near * like.element_size() + 2 * far * torch.finfo(_sum_dtype(like)).bits // 8
        return Cost(self.unit.flops * length + flops, kept if self.causal else 0)

    def growth(self) -> Growth:
        return Growth(f"n·({self.chunk} + {self.dim})·d", "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.unit.into.weight, self.unit.out.weight)


def _sum_dtype(like: Tensor) -> torch.dtype:
    return torch.promote_types(like.dtype, torch.float32)
