"""Attention in which some rows only ask: XLNet's two streams as one sequence, content rows first, then query rows.

    content row at place i    sees what the pattern allows, and itself
    query row at place i      sees what the pattern allows, but never its own place; nobody sees a query row

    score = (q + u) . k  +  (q + v) . W r_(i-j)  +  (q + s) . E[the key is of the same sentence, or of another]

The first two terms are the position's. A query row is a column that is not real: it stands behind the real ones and has
the place that it asks about. What was given to a layer for the last positions before a step is remembered, as in
Transformer-XL; a step is a whole segment, whose rows may look ahead, so that the cuts matter.

Yang et al. 2019, "XLNet", arXiv:1906.08237.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.bases.attention_mask import AttentionMask
from regard.bases.multihead import MultiHead
from regard.core import Context, Cost, Pattern, Place, Position


class Past(NamedTuple):
    """What went into the layer before this segment."""

    x: Tensor  # (batch, memory, width)
    at: Tensor  # (batch, memory) places, -1 for none


class TwoStreams(MultiHead):
    """dim:    channels of a head; None: width / heads.
    pattern:   who may look at whom; a batch adds its order to it.
    position:  transformer_xl in the paper.
    bias:      the maps that have one, as in attention.
    memory:    positions before a segment that are remembered.
    sentences: whether a key is of the query's sentence counts, where a batch tells of sentences.
    """

    examples = (
        {"pattern": "everything", "position": "transformer_xl", "sentences": True},
        {"pattern": "causal", "memory": 5},
        {"pattern": "window(4)", "bias": False, "position": {"part": "transformer_xl", "clip": 3}},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int | None = None,
        pattern: Pattern | str = "everything",
        position: Position | str | dict = "none",
        bias: bool | str = True,
        memory: int = 0,
        sentences: bool = False,
        weight_dropout: float = 0.0,
        kernel: str = "sdpa",
        place: Place | None = None,
    ):
        super().__init__(
            width, heads, dim=dim, pattern=pattern, position=position, bias=bias, weight_dropout=weight_dropout,
            kernel=kernel, place=place,
        )  # fmt: skip
        self.memory = memory
        self.register_parameter("s", None)
        self.register_parameter("kinds", None)
        if sentences:
            self.s = nn.Parameter(torch.empty(heads, self.dim).normal_(std=0.02))
            self.kinds = nn.Parameter(torch.empty(2, heads, self.dim).normal_(std=0.02))  # the same, another

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return False

    def start(self, context: Context, capacity: int) -> Past:  # type: ignore[override]
        batch, like = context.positions.shape[0], self.q.weight
        at = torch.full((batch, self.memory), -1, device=like.device)
        return Past(like.new_zeros(batch, self.memory, self.width), at)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        nothing = Past(x[:, :0], context.positions[:, :0])
        return self._read(x, nothing, context)[0]

    def step(self, x: Tensor, state: Past, context: Context) -> tuple[Tensor, Past]:  # type: ignore[override]
        y, seen, at = self._read(x, state, context)
        order = (at >= 0).int().argsort(stable=True, dim=1)[:, at.shape[1] - self.memory :]  # the last real rows
        return y, Past(seen.gather(1, order[..., None].expand(-1, -1, self.width)), at.gather(1, order))

    def _read(self, x: Tensor, state: Past, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """The output (batch, n, width), and the rows that could be seen with their places: (batch, m, width) and
        (batch, m)."""
        at, count = context.positions, x.shape[1]
        if context.valid is not None:
            count = int(context.lengths.max())
            at = torch.where(context.valid, at, -1)
        seen, key_at = torch.cat((state.x, x[:, :count]), 1), torch.cat((state.at, at[:, :count]), 1)
        keys, values = self.keys(seen, key_at.clamp(min=0))
        see = AttentionMask(Told(self._allowed(context, key_at)), context.positions, key_at)
        q, plain = self.queries(x, context.positions)
        position = self.position
        if self.s is not None and context.segments is not None:
            position = Sentenced(self.position, self._other(x, context.segments, state.at.shape[1], count))
        y = self.attend(q, keys.transpose(1, 2), values.transpose(1, 2), see, self.score, position, plain)
        y = self.out(self.norm(y.transpose(1, 2).flatten(-2), context.valid))
        return y, seen, key_at

    def _allowed(self, context: Context, key_at: Tensor) -> Tensor:
        """(batch, heads or 1, n, m)"""
        query_at, key_at = context.positions[:, None, :, None], key_at[:, None, None, :]
        pattern = self.pattern if context.pattern is None else self.pattern & context.pattern
        own = query_at == key_at
        if context.valid is None:
            return (pattern.allows(query_at, key_at) | own) & (key_at >= 0)
        real = context.valid[:, None, :, None]
        return ((pattern.allows(query_at, key_at) & ~own) | (own & real)) & (key_at >= 0)

    def _other(self, x: Tensor, segments: Tensor, past: int, count: int) -> Tensor:
        """(batch, heads, n, past + count): what is added to the score of a key of another sentence. All that is
        remembered is of the first one."""
        q = self.q(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        asked = self.score.query(q + self.s[:, None]) @ (self.kinds[1] - self.kinds[0])[:, :, None]
        of_keys = torch.cat((segments.new_zeros(len(segments), past), segments[:, :count]), 1)
        return asked * (segments[:, None, :, None] != of_keys[:, None, None, :])

    def cost(self, length: int, past: int = 0) -> Cost:
        """Without sentences."""
        return super().cost(length, min(past, self.memory))


@dataclass(frozen=True, eq=False)
class Told(Pattern):
    """One that is known already for the places that are asked about."""

    allowed: Tensor  # (batch, heads or 1, n, m)

    @property
    def fixed(self) -> bool:
        return False

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return self.allowed


class Sentenced(Position):
    """A position with something more on the scores of this one call."""

    def __init__(self, position: Position, more: Tensor):
        super().__init__()
        self.position, self.more, self.needs_query = position, more, position.needs_query

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        bias = self.position.bias(query_at, key_at, q)
        return self.more if bias is None else bias + self.more
