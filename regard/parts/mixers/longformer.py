"""Longformer: sliding-window attention, plus a few global tokens that attend to everything with projections of their
               own.

    local     softmax over the window and the hubs,          q = W_q x       k, v = W_k x, W_v x
    hubs      softmax over all positions,                    q = W_q' x      k, v = W_k' x, W_v' x

Beltagy et al. 2020, "Longformer: The Long-Document Transformer", arXiv:2004.05150. Global tokens are
called hubs here. If they share the projections of the others, the pattern `window(257) | global_tokens(1)` is enough;
as a language model it has no hubs, but a pattern such as `causal & heads(window(256), dilated(256, 2))`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.bases import AttentionMask, blocks
from regard.bases.multihead import MultiHead
from regard.core import Context, Cost, Growth, Norm, Pattern, Place, Position, Score, UserError, find, part
from regard.ops.join import merge, partial_attention


class Longformer(MultiHead):
    """pattern: the local pattern: window(257) sees 256 positions on either side; heads may differ.
    hubs:     number of hubs at the start of the sequence: 1 for a [CLS].
    segment:  all positions of this segment are hubs too, such as those of a question, if the batch has segments.
    The other arguments are those of attention.
    """

    examples = (
        {"pattern": "window(3)"},
        {"pattern": "heads(window(4), dilated(2, 3), window(1, 2))", "hubs": 2, "position": "rotary"},
        {"pattern": "window(2)", "hubs": 0, "segment": 0, "kv_heads": 1},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        pattern: Pattern | str,
        hubs: int = 1,
        segment: int | None = None,
        kv_heads: int | None = None,
        position: Position | str | dict = "none",
        score: Score | str | dict = "scaled_dot",
        bias: bool | str = True,
        norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
        kernel: str = "auto",
        place: Place | None = None,
    ):
        if hubs < 0 or (segment is not None and segment < 0):
            raise UserError(f"hubs and segment are whole numbers from 0 on, not {hubs} and {segment}")
        if hubs == 0 and segment is None:
            raise UserError(
                "longformer without hubs is attention with a pattern: set hubs or segment, or use attention"
            )
        near = part(Pattern, pattern)
        common = {"kv_heads": kv_heads, "score": score, "weight_dropout": weight_dropout, "kernel": kernel}
        super().__init__(
            width,
            heads,
            pattern=near | find(Pattern, "first")(hubs) if hubs else near,
            position=position,
            bias=bias,
            norm=norm,
            place=place,
            **common,
        )
        self.hubs, self.segment = hubs, segment
        self.hub = MultiHead(
            width, heads, pattern="everything", position=self.position, project="qkv", bias=bias, **common
        )

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return False

    def forward(self, x: Tensor, context: Context) -> Tensor:
        at, padded = context.positions[:1], context.valid is not None
        mask = AttentionMask(
            self._pattern(context), at, context.marked_positions if padded else at, context.from_start, padded
        )
        marks = self._marks(context)
        y = self._local(x, mask, marks, context)
        if self.hubs or marks is not None:
            y = self._global(x, y, mask, marks, context)
        return self.out(self.norm(y, context.valid))

    def _marks(self, context: Context) -> Tensor | None:
        """Return the positions (batch, time) that the batch marks as hubs."""
        if self.segment is None or context.segments is None:
            return None
        marks = context.segments == self.segment
        return marks if context.valid is None else marks & context.valid

    def _local(self, x: Tensor, mask: AttentionMask, marks: Tensor | None, context: Context) -> Tensor:
        """Return the local attention over window and hubs, (batch, time, width)."""
        keys, values = self.keys(x, mask.query_at)
        if marks is None:
            return self.read(x, keys, values, mask)
        q, plain = self.queries(x, mask.query_at)
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        drop = self.attend.dropout if self.training else 0.0
        if self.attend.choose(q, k, mask, self.score, self.position, drop) != "blocks" or context.pattern is not None:
            pattern = self.pattern | find(Pattern, "marked")(marks)
            pattern = pattern if context.pattern is None else pattern & context.pattern
            return self.read(x, keys, values, mask._replace(pattern=pattern))
        others = mask._replace(pattern=mask.pattern & ~find(Pattern, "marked")(marks))
        indices, real = marked_indices(marks)
        k_hubs, v_hubs = (t.gather(2, indices[:, None, :, None].expand(-1, t.shape[1], -1, t.shape[3])) for t in (k, v))
        bias = self.position.bias(mask.query_at[:, None, :, None], indices[:, None, None, :], plain)
        hubs = partial_attention(q, k_hubs, v_hubs, ~real[:, None, None, :], bias, drop)
        y = merge((blocks.attend_partially(q, k, v, others, self.position, plain, drop), hubs)).y
        return y.transpose(1, 2).flatten(-2)

    def _global(self, x: Tensor, y: Tensor, mask: AttentionMask, marks: Tensor | None, context: Context) -> Tensor:
        """Return y with the rows of the hubs replaced by their global attention."""
        batch, time = x.shape[:2]
        first = (mask.query_at < self.hubs).expand(batch, time)
        hubs = first if marks is None else first | marks
        pattern = self.hub.pattern if context.pattern is None else context.pattern
        if torch.compiler.is_exporting():  # the number of hubs is unknown, so every position is computed as a hub
            global_mask = AttentionMask(pattern, mask.query_at, mask.key_at, holes=mask.holes)
            return torch.where(hubs[..., None], self.hub.read(x, *self.hub.keys(x, mask.query_at), global_mask), y)
        indices, real = marked_indices(hubs)
        if not indices.shape[1]:
            return y
        index = indices[..., None].expand(-1, -1, x.shape[2])
        global_mask = AttentionMask(pattern, indices, mask.key_at, holes=mask.holes)
        found = self.hub.read(x.gather(1, index), *self.hub.keys(x, mask.query_at), global_mask)
        index = indices[..., None].expand(-1, -1, y.shape[2])
        return y.scatter(1, index, torch.where(real[..., None], found.to(y.dtype), y.gather(1, index)))

    def cost(self, length: int, past: int = 0) -> Cost:
        """Count only the hubs at the start of the sequence."""
        hubs, inner = min(self.hubs, length), self.heads * self.dim
        projections = (
            2 * (hubs * self.hub.q.weight.numel() + length * 2 * self.hub.k.weight.numel()) if self.hubs else 0
        )
        attended = hubs * length
        flops = projections + attended * 4 * inner + self.score.flops(hubs, length, attended)
        flops += self.position.flops(hubs, length, attended) if self.hubs else 0
        return Cost(super().cost(length, past).flops + flops, 0)

    def growth(self) -> Growth:
        return super().growth()._replace(path="2")

    def value_path(self) -> Iterator[Tensor]:
        yield from super().value_path()
        yield self.hub.v.weight


def marked_indices(marks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the marked positions of each row, (batch, count), and which of these are marked."""
    count = int(marks.sum(1).max())
    indices = marks.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
    return indices, marks.gather(1, indices)
