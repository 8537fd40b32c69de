"""LSH attention: a position looks only at those that a random hash puts into its bucket, and similar ones mostly are.

    score_ij = q_i . k_j,      k_j = q_j / |q_j|
    y_i = softmax over the j in i's bucket, in one round of hashing or another, j other than i

Queries and keys are one map, so that they fall into the same buckets; a position then likes itself best, and sees
itself only where it sees nothing else. Sorted by bucket, the sequence is cut into chunks that see themselves and their
neighbours, so the work grows with the length alone.

Where such chunks begin depends on the buckets of all positions, later ones too: what a position sees would change with
the future, and no cut into steps could give the same. So the causal form sees the last `before * size` positions of the
bucket: what the paper's chunks hold, but for where they begin. Those of the paper are cut = "chunks".

Kitaev et al. 2020, "Reformer: The Efficient Transformer", arXiv:2001.04451.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.bases.cache import grow_slots, write
from regard.core import Context, Cost, Growth, Mixer, Norm, Tap, UserError, part
from regard.ops import lsh

FEW = 64  # a step of more positions than this sorts the whole sequence again


class Hashed(NamedTuple):
    """Keys, values and buckets of all positions; the last place takes what is not real."""

    keys: Tensor  # (batch, places + 1, heads, dim)
    values: Tensor  # (batch, places + 1, heads, dim)
    buckets: Tensor  # (batch, places + 1, heads, rounds)


class Lsh(Mixer[Hashed]):
    """buckets: of each round, an even number; a list: hashed each for itself, their product in all.
    rounds:     of hashing, each with its own rotations.
    size:       positions of a chunk.
    before:     chunks before its own that a query sees; after: those behind it.
    causal:     only what came earlier.
    cut:        "bucket": the last `before * size` of the bucket; "chunks": of the sorted order, as in the paper, for
                whole sequences only. None: "bucket" if it is causal.
    across:     also what other buckets have in those chunks (Hugging Face).
    repeats:    what is found in several rounds counts several times (Hugging Face).
    seed:       of the rotations; None: drawn as weights are, anew in each layer.
    dim:        channels of a head; None: width / heads.
    scale:      of scores. 1 in the authors' code; reformer-pytorch has 1/sqrt(dim).
    eps:        added to the mean square of a key's channels before its root is divided by.
    bias:       of the maps.
    norm:       on the heads' output before the last map.
    """

    examples = (
        {"buckets": 4, "size": 3},
        {"buckets": [2, 4], "rounds": 3, "size": 2, "before": 2, "dim": 5, "bias": True, "norm": "layer"},
        {"buckets": 2, "rounds": 1, "size": 4, "seed": 3},
        {"buckets": 4, "size": 3, "cut": "chunks"},
        {"buckets": 4, "size": 3, "causal": False, "after": 1},
        {"buckets": 4, "size": 4, "causal": False, "after": 1, "across": True, "repeats": True, "scale": 0.5},
        {"buckets": 4, "size": 2, "cut": "chunks", "across": True},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        buckets: int | list = 64,
        rounds: int = 2,
        size: int = 64,
        before: int = 1,
        after: int = 0,
        causal: bool = True,
        cut: str | None = None,
        across: bool = False,
        repeats: bool = False,
        seed: int | None = None,
        dim: int | None = None,
        scale: float = 1.0,
        eps: float = 1e-6,
        bias: bool = False,
        norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
    ):
        super().__init__()
        if dim is None and width % heads:
            raise UserError(f"width {width} is not divisible by {heads} heads: change one, or give dim")
        self.buckets = tuple(buckets) if isinstance(buckets, list) else (buckets,)
        if not self.buckets or any(not isinstance(n, int) or n < 2 or n % 2 for n in self.buckets):
            raise UserError(f"buckets must be an even number from 2 on, or a list of such, not {buckets}")
        if min(rounds, size) < 1 or min(before, after) < 0:
            raise UserError(f"rounds and size must be at least 1, not {rounds} and {size}, before and after at least 0")
        cut = ("bucket" if causal else "chunks") if cut is None else cut
        if cut not in ("bucket", "chunks"):
            raise UserError(f"cut must be 'bucket' or 'chunks', not '{cut}'")
        if cut == "bucket" and (not causal or across or repeats or after or not before):
            raise UserError(
                "cut = 'bucket' is a causal look at what came before in the own bucket, with before >= 1 and without "
                "after, across and repeats: say cut = 'chunks'"
            )
        self.width, self.heads, self.dim, self.rounds = width, heads, dim or width // heads, rounds
        near = before * size if cut == "bucket" else 0
        self.rule = lsh.LshRule(size, before, after, causal, near, across, repeats)
        self.scale, self.eps, self.weight_dropout = scale, eps, weight_dropout
        inner = heads * self.dim
        self.qk, self.v = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.out = nn.Linear(inner, width, bias=bias)
        self.norm = part(Norm, norm, width=inner)
        self.weights = Tap()
        chance = None if seed is None else torch.Generator().manual_seed(seed)
        place = {"device": "cpu"} if chance else {}  # the same numbers wherever the model is made
        turns = torch.randn(heads, self.dim, rounds, sum(self.buckets) // 2, generator=chance, **place)
        self.register_buffer("rotations", turns.to(self.qk.weight.device))
        for linear in (self.qk, self.v, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return bool(self.rule.near)

    def prepared(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (batch, time, width) -> queries, keys and values (batch, heads, time, dim)"""
        qk, v = (m(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2) for m in (self.qk, self.v))
        return qk, self.keys(qk), v

    def keys(self, qk: Tensor) -> Tensor:
        """(batch, heads, time, dim), all of one length: the scale of scores"""
        return qk * (qk.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.scale * self.dim**-0.5)

    def hashed(self, qk: Tensor) -> Tensor:
        """qk (batch, heads, time, dim) -> (batch, heads, rounds, time)"""
        return lsh.bucket(qk, self.rotations, self.buckets)

    def look(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, lengths: Tensor) -> Tensor:
        """Whole sequences: q, k and v (batch, heads, time, dim) -> the same."""
        if self.weights.watched:
            return self.weights(lsh.dense_weights(q, k, buckets, lengths, self.rule)).to(v.dtype) @ v
        drop = self.weight_dropout if self.training else 0.0
        y, total = lsh.attend(q, k, v, buckets, lengths, self.rule, drop)
        return torch.where(total.isneginf()[..., None], v, y)

    def leave(self, y: Tensor, context: Context) -> Tensor:
        return self.out(self.norm(y.transpose(1, 2).flatten(-2), context.valid))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self._check(context)
        q, k, v = self.prepared(x)
        return self.leave(self.look(q, k, v, self.hashed(q), context.lengths), context)

    def _check(self, context: Context) -> None:
        if context.pattern is not None:
            raise UserError("lsh attention goes by its hash, so it cannot follow a pattern given with the batch")

    def start(self, context: Context, capacity: int) -> Hashed:
        shape = context.positions.shape[0], capacity + 1, self.heads
        like = self.qk.weight
        keys, values = like.new_zeros(*shape, self.dim), like.new_zeros(*shape, self.dim)
        return Hashed(keys, values, torch.zeros(*shape, self.rounds, dtype=torch.int32, device=like.device))

    def step(self, x: Tensor, state: Hashed, context: Context) -> tuple[Tensor, Hashed]:
        if not self.streams:
            raise UserError("with cut = 'chunks' what a position sees depends on later ones, so this lsh does not step")
        self._check(context)
        known = max(context.last_position + 1, 1)
        state = Hashed(*(grow_slots(tensor, known) for tensor in state))
        room = state.keys.shape[1] - 1
        q, k, v = self.prepared(x)
        buckets = self.hashed(q).int()
        slot = context.positions
        if context.valid is not None:
            slot = torch.where(context.valid, slot, room)
        new = (k.transpose(1, 2), v.transpose(1, 2), buckets.permute(0, 3, 1, 2))
        state = Hashed(*(write(old, slot, some) for old, some in zip(state, new, strict=True)))
        keys, values = (t[:, :known].transpose(1, 2) for t in state[:2])
        old = state.buckets[:, :known].permute(0, 2, 3, 1)
        if x.shape[1] > FEW:
            queries = write(torch.zeros_like(state.keys), slot, q.transpose(1, 2))[:, :known].transpose(1, 2)
            whole = self.look(queries, keys, values, old, context.positions[:, 0] + context.lengths)
            at = context.positions.clamp(max=known - 1)[:, None].expand(-1, self.heads, -1)
            return self.leave(lsh.gather(whole, at), context), state
        y, alone = lsh.attend_step(q, keys, values, buckets, old, context.positions, self.rule.near)
        return self.leave(torch.where(alone[..., None], v, y), context), state

    def cost(self, length: int, past: int = 0) -> Cost:
        whole, size, inner = past + length, self.rule.size, self.heads * self.dim
        maps = sum(m.weight.numel() for m in (self.qk, self.v, self.out)) + self.rotations.numel()
        if self.streams and length <= FEW:
            looks = length * min(self.rounds * self.rule.near, whole)
        else:
            looks = self.rounds * -(-whole // size) * size * self.rule.span
        kept = (whole + 1) * (2 * inner * self.qk.weight.element_size() + 4 * self.heads * self.rounds)
        return Cost(2 * length * maps + 4 * inner * looks, kept if self.streams else 0)

    def growth(self) -> Growth:
        return Growth(f"n·{self.rounds * self.rule.span}·d", "log n", "log n")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
