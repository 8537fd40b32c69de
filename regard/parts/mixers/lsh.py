"""LSH attention: a position attends only to those that a random hash puts into the same bucket, which are mostly
similar.

    score_ij = q_i . k_j,      k_j = q_j / |q_j|
    y_i = softmax over the j in i's bucket, in one round of hashing or another, j other than i

Queries and keys share one projection, so that they fall into the same buckets; a position then scores itself highest,
and attends to itself only if there is nothing else. Sorted by bucket, the sequence is cut into chunks that attend to
themselves and their neighbors, so the cost is linear in the length.

Where such chunks begin depends on the buckets of all positions, later ones too: the output of a position would depend
on the future, and on how a sequence is cut into steps. So the causal form attends to the last `before * size` positions
of the
bucket: what the paper's chunks hold, except for where they begin. The chunks of the paper are cut = "chunks".

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

MAX_SHORT_STEP = 64  # a longer step sorts the whole sequence again


class LshCache(NamedTuple):
    """Keys, values and buckets of all positions; the last slot is for padding."""

    keys: Tensor  # (batch, capacity + 1, heads, dim)
    values: Tensor  # (batch, capacity + 1, heads, dim)
    buckets: Tensor  # (batch, capacity + 1, heads, rounds)


class Lsh(Mixer[LshCache]):
    """buckets: number of buckets per round, even; a list: their product, each factor hash by itself.
    rounds:     rounds of hashing, each with its own rotations.
    size:       positions in a chunk.
    before:     number of chunks before its own that a query sees.
    after:      number of chunks after its own that a query sees.
    causal:     attend to earlier positions only.
    cut:        "bucket": the last `before * size` positions of the bucket; "chunks": chunks of the sorted order, as in
                the paper, for whole sequences only. None: "bucket" if it is causal.
    across:     also attend to other buckets in those chunks (Hugging Face).
    repeats:    a key found in several rounds counts several times (Hugging Face).
    seed:       seed of the rotations; None: drawn like weights, differently in each layer.
    dim:        channels of a head; None: width / heads.
    scale:      factor on the scores. 1 in the authors' code; reformer-pytorch has 1/sqrt(dim).
    eps:        added to the mean square of a key's channels before it is normalized.
    bias:       the projections have a bias.
    norm:       norm on the output of the heads, before the output projection.
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
                "cut = 'bucket' attends to earlier positions of the same bucket, with before >= 1 and without "
                "after, across and repeats: set cut = 'chunks'"
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
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        device = {"device": "cpu"} if generator else {}  # the same numbers on every device
        rotations = torch.randn(heads, self.dim, rounds, sum(self.buckets) // 2, generator=generator, **device)
        self.register_buffer("rotations", rotations.to(self.qk.weight.device))
        for linear in (self.qk, self.v, self.out):
            nn.init.xavier_uniform_(linear.weight)
            if bias:
                nn.init.zeros_(linear.bias)

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return bool(self.rule.near)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (batch, heads, time, dim) of x (batch, time, width)."""
        qk, v = (m(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2) for m in (self.qk, self.v))
        return qk, self.keys(qk), v

    def keys(self, qk: Tensor) -> Tensor:
        """Normalize queries to keys (batch, heads, time, dim) whose length is the scale of the scores."""
        return qk * (qk.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (self.scale * self.dim**-0.5)

    def bucket_ids(self, qk: Tensor) -> Tensor:
        """Return the bucket of each query: (batch, heads, time, dim) -> (batch, heads, rounds, time)."""
        return lsh.bucket(qk, self.rotations, self.buckets)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, buckets: Tensor, lengths: Tensor) -> Tensor:
        """Attend over whole sequences: q, k and v (batch, heads, time, dim) -> (batch, heads, time, dim)."""
        if self.weights.watched:
            return self.weights(lsh.dense_weights(q, k, buckets, lengths, self.rule)).to(v.dtype) @ v
        drop = self.weight_dropout if self.training else 0.0
        y, total = lsh.attend(q, k, v, buckets, lengths, self.rule, drop)
        return torch.where(total.isneginf()[..., None], v, y)

    def project_out(self, y: Tensor, context: Context) -> Tensor:
        return self.out(self.norm(y.transpose(1, 2).flatten(-2), context.valid))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self._check(context)
        q, k, v = self.project(x)
        return self.project_out(self.attend(q, k, v, self.bucket_ids(q), context.lengths), context)

    def _check(self, context: Context) -> None:
        if context.pattern is not None:
            raise UserError(
                "lsh attention chooses keys by their hash, so it cannot follow a pattern given with the batch"
            )

    def start(self, context: Context, capacity: int) -> LshCache:
        shape = context.positions.shape[0], capacity + 1, self.heads
        like = self.qk.weight
        keys, values = like.new_zeros(*shape, self.dim), like.new_zeros(*shape, self.dim)
        return LshCache(keys, values, torch.zeros(*shape, self.rounds, dtype=torch.int32, device=like.device))

    def step(self, x: Tensor, state: LshCache, context: Context) -> tuple[Tensor, LshCache]:
        if not self.streams:
            raise UserError(
                "with cut = 'chunks' the keys of a position depend on later ones, so this lsh does not step"
            )
        self._check(context)
        end = max(context.last_position + 1, 1)
        state = LshCache(*(grow_slots(tensor, end) for tensor in state))
        last_slot = state.keys.shape[1] - 1
        q, k, v = self.project(x)
        buckets = self.bucket_ids(q).int()
        slot = context.positions
        if context.valid is not None:
            slot = torch.where(context.valid, slot, last_slot)
        new = (k.transpose(1, 2), v.transpose(1, 2), buckets.permute(0, 3, 1, 2))
        state = LshCache(*(write(old, slot, some) for old, some in zip(state, new, strict=True)))
        keys, values = (t[:, :end].transpose(1, 2) for t in state[:2])
        old = state.buckets[:, :end].permute(0, 2, 3, 1)
        if x.shape[1] > MAX_SHORT_STEP:
            queries = write(torch.zeros_like(state.keys), slot, q.transpose(1, 2))[:, :end].transpose(1, 2)
            whole = self.attend(queries, keys, values, old, context.positions[:, 0] + context.lengths)
            at = context.positions.clamp(max=end - 1)[:, None].expand(-1, self.heads, -1)
            return self.project_out(lsh.gather(whole, at), context), state
        y, alone = lsh.attend_step(q, keys, values, buckets, old, context.positions, self.rule.near)
        return self.project_out(torch.where(alone[..., None], v, y), context), state

    def cost(self, length: int, past: int = 0) -> Cost:
        total, size, inner = past + length, self.rule.size, self.heads * self.dim
        projections = sum(m.weight.numel() for m in (self.qk, self.v, self.out)) + self.rotations.numel()
        if self.streams and length <= MAX_SHORT_STEP:
            pairs = length * min(self.rounds * self.rule.near, total)
        else:
            pairs = self.rounds * -(-total // size) * size * self.rule.span
        kept = (total + 1) * (2 * inner * self.qk.weight.element_size() + 4 * self.heads * self.rounds)
        return Cost(2 * length * projections + 4 * inner * pairs, kept if self.streams else 0)

    def growth(self) -> Growth:
        return Growth(f"n·{self.rounds * self.rule.span}·d", "log n", "log n")

    def value_path(self) -> Iterator[Tensor]:
        yield from (self.v.weight, self.out.weight)
