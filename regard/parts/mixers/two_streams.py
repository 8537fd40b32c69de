"""XLNet's two-stream attention, with both streams in one sequence: content rows first, then query rows.

    content row at position i    attends to what the pattern allows, and to itself
    query row at position i      attends to what the pattern allows, but never to position i; no row attends to query
    rows

    score = (q + u) . k  +  (q + v) . W r_(i-j)  +  (q + s) . E[same sentence or not]

The first two terms come from the position. A query row is passed as padding (valid = False) after the content rows,
with the position that it predicts. As in Transformer-XL, the state holds the layer's inputs at the last positions
before a step; a step is a whole segment, whose rows may attend to later ones, so the output depends on the cuts.

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
    """The inputs of the layer before this segment."""

    x: Tensor  # (batch, memory, width)
    at: Tensor  # (batch, memory) positions, -1 for none


class TwoStreams(MultiHead):
    """dim:    channels of a head; None: width / heads.
    pattern:   which keys each query may attend to; a batch adds its factorization order to it.
    position:  transformer_xl in the paper.
    bias:      which projections have a bias, as in attention.
    memory:    number of positions before a segment that are remembered.
    sentences: the score also depends on whether query and key are in the same sentence, if the batch has segments.
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
            self.kinds = nn.Parameter(
                torch.empty(2, heads, self.dim).normal_(std=0.02)
            )  # same sentence, another sentence

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return False

    def start(self, context: Context, capacity: int) -> Past:  # type: ignore[override]
        batch, like = context.positions.shape[0], self.q.weight
        at = torch.full((batch, self.memory), -1, device=like.device)
        return Past(like.new_zeros(batch, self.memory, self.width), at)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        empty = Past(x[:, :0], context.positions[:, :0])
        return self._read(x, empty, context)[0]

    def step(self, x: Tensor, state: Past, context: Context) -> tuple[Tensor, Past]:  # type: ignore[override]
        y, seen, at = self._read(x, state, context)
        order = (at >= 0).int().argsort(stable=True, dim=1)[:, at.shape[1] - self.memory :]  # the last content rows
        return y, Past(seen.gather(1, order[..., None].expand(-1, -1, self.width)), at.gather(1, order))

    def _read(self, x: Tensor, state: Past, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output (batch, n, width), and the rows that could be attended to with their positions, (batch, m,
        width) and (batch, m)."""
        at, count = context.positions, x.shape[1]
        if context.valid is not None:
            count = int(context.lengths.max())
            at = torch.where(context.valid, at, -1)
        seen, key_at = torch.cat((state.x, x[:, :count]), 1), torch.cat((state.at, at[:, :count]), 1)
        keys, values = self.keys(seen, key_at.clamp(min=0))
        mask = AttentionMask(FixedMask(self._allowed(context, key_at)), context.positions, key_at)
        q, plain = self.queries(x, context.positions)
        position = self.position
        if self.s is not None and context.segments is not None:
            position = WithExtraBias(self.position, self._sentence_bias(x, context.segments, state.at.shape[1], count))
        y = self.attend(q, keys.transpose(1, 2), values.transpose(1, 2), mask, self.score, position, plain)
        y = self.out(self.norm(y.transpose(1, 2).flatten(-2), context.valid))
        return y, seen, key_at

    def _allowed(self, context: Context, key_at: Tensor) -> Tensor:
        """Return the attention mask (batch, heads or 1, n, m)."""
        query_at, key_at = context.positions[:, None, :, None], key_at[:, None, None, :]
        pattern = self.pattern if context.pattern is None else self.pattern & context.pattern
        own = query_at == key_at
        if context.valid is None:
            return (pattern.allows(query_at, key_at) | own) & (key_at >= 0)
        real = context.valid[:, None, :, None]
        return ((pattern.allows(query_at, key_at) & ~own) | (own & real)) & (key_at >= 0)

    def _sentence_bias(self, x: Tensor, segments: Tensor, past: int, count: int) -> Tensor:
        """Return what is added to the score of a key of another sentence, (batch, heads, n, past + count). Remembered
        positions count as the first sentence."""
        q = self.q(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        scores = self.score.query(q + self.s[:, None]) @ (self.kinds[1] - self.kinds[0])[:, :, None]
        key_segments = torch.cat((segments.new_zeros(len(segments), past), segments[:, :count]), 1)
        return scores * (segments[:, None, :, None] != key_segments[:, None, None, :])

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count the cost without sentences."""
        return super().cost(length, min(past, self.memory))


@dataclass(frozen=True, eq=False)
class FixedMask(Pattern):
    """A pattern with a given mask, whatever the positions."""

    allowed: Tensor  # (batch, heads or 1, n, m)

    @property
    def fixed(self) -> bool:
        return False

    def allows(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        return self.allowed


class WithExtraBias(Position):
    """A position with an extra bias on the scores of one call."""

    def __init__(self, position: Position, extra: Tensor):
        super().__init__()
        self.position, self.extra, self.needs_query = position, extra, position.needs_query

    def bias(self, query_at: Tensor, key_at: Tensor, q: Tensor) -> Tensor:
        bias = self.position.bias(query_at, key_at, q)
        return self.extra if bias is None else bias + self.extra
