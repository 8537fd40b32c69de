"""Memory-compressed attention: a strided convolution merges every `factor` keys and values into one, so that a query
attends to fewer of them.

    k'_g = sum over r < f of  C_r k_(f g + r) + b          and v' the same, with C and b learned
    y_i  = softmax over {a} and the groups g visible to i of (q_i . k' / sqrt(dim))  v'

A causal query sees a group once it is complete. One key, a, is visible to all queries from the start: a learned key and
value, or those of the first position. Positions after the last complete group are invisible, so these layers alternate
with layers of local attention.

Liu et al. 2018, "Generating Wikipedia by Summarizing Long Sequences", arXiv:1801.10198, section 4.2.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases import AttentionMask
from regard.bases.cache import grow_slots, write
from regard.bases.multihead import MultiHead
from regard.core import Context, Cost, Growth, Norm, Score, UserError


class Groups(NamedTuple):
    """The key visible to all, the groups that are complete, and the inputs of the next one."""

    keys: Tensor  # (batch, groups + 2, heads, dim): the key visible to all, the groups, and a slot for padding
    values: Tensor  # the same
    rest: Tensor  # (batch, factor - 1, channels), the last inputs of the convolution, oldest first


class Compressed(MultiHead):
    """factor:  number of positions that are merged into one.
    compress: "keys": keys and values are merged, each head by itself; "input": the input of the key and value
              projections, all channels together (tensor2tensor).
    first:    the key visible to all queries: "learned", a learned key and value; "position", those of the first
              position.
    causal:   a query sees the groups that end at or before it; otherwise all groups.
    strict:   a query sees only the groups that end before it (tensor2tensor).
    dim:      channels of a head; None: width / heads.
    score:    how the score of a query and a key is computed.
    bias:     which of the projections q, k, v, o have a bias: True for all, False for none, or their letters.
    norm:     norm on the output of the heads, before the output projection.
    """

    examples = (
        {},
        {"factor": 4, "compress": "input", "first": "position", "strict": True, "bias": False},
        {"factor": 1, "dim": 5, "norm": "layer", "bias": "o"},
        {"factor": 2, "compress": "keys", "first": "position"},
        {"factor": 3, "causal": False},
        {"factor": 5, "causal": False, "compress": "input", "first": "position"},
    )

    def __init__(
        self,
        width: int,
        heads: int,
        factor: int = 3,
        compress: str = "keys",
        first: str = "learned",
        causal: bool = True,
        strict: bool = False,
        dim: int | None = None,
        score: Score | str | dict = "scaled_dot",
        bias: bool | str = True,
        norm: Norm | str | dict = "none",
        weight_dropout: float = 0.0,
        kernel: str = "auto",
    ):
        pattern = "causal" if causal else "everything"
        super().__init__(
            width, heads, dim=dim, pattern=pattern, score=score, bias=bias, norm=norm, weight_dropout=weight_dropout,
            kernel=kernel,
        )  # fmt: skip
        if factor < 1:
            raise UserError(f"factor must be at least 1, not {factor}")
        if compress not in ("keys", "input"):
            raise UserError(f"compress must be 'keys' or 'input', not '{compress}'")
        if first not in ("learned", "position"):
            raise UserError(f"first must be 'learned' or 'position', not '{first}'")
        self.factor, self.compress, self.causal, self.offset = factor, compress, causal, 0 if strict else 1
        inner = heads * self.dim
        channels, groups = (inner, heads) if compress == "keys" else (width, 1)
        self.squeeze = nn.Conv1d(channels, channels, factor, stride=factor, groups=groups)
        made = [nn.Parameter(torch.empty(inner).normal_(std=self.dim**-0.5)) for _ in range(2 * (first == "learned"))]
        self.first_key, self.first_value = made or (None, None)

    @property
    def channels(self) -> int:
        """The number of channels that are merged: keys and values concatenated, or the input."""
        return 2 * self.heads * self.dim if self.compress == "keys" else self.width

    def merge_inputs(self, x: Tensor) -> Tensor:
        """Return the inputs of the merging convolution: (batch, time, width) -> (batch, time, channels)."""
        return torch.cat((self.k(x), self.v(x)), -1) if self.compress == "keys" else x

    def merged(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Merge complete groups (batch, positions, channels) into keys and values (batch, groups, heads, dim)."""
        if self.compress == "input":
            return self.unmerged(self.squeeze(groups.mT).mT)
        both = torch.cat(groups.chunk(2, -1))  # keys of all rows, then values of all rows
        return self._heads(*self.squeeze(both.mT).mT.chunk(2))

    def unmerged(self, merge_inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (batch, n, heads, dim) of (batch, n, channels), without merging."""
        if self.compress == "input":
            return self._heads(self.k(merge_inputs), self.v(merge_inputs))
        return self._heads(*merge_inputs.chunk(2, -1))

    def _heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (t.unflatten(-1, (self.heads, self.dim)) for t in (keys, values))
        return self.score.key(keys.transpose(1, 2)).transpose(1, 2), values

    def first_key_value(self, merge_inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key and value (batch, 1, heads, dim) that are visible to all queries."""
        if self.first_key is None:
            return self.unmerged(merge_inputs[:, :1])
        batch = merge_inputs.shape[0]
        return self._heads(*(t.expand(batch, 1, -1) for t in (self.first_key, self.first_value)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self._check(context)
        time, merge_inputs = x.shape[1], self.merge_inputs(x)
        if context.valid is not None and not self.causal:
            merge_inputs = merge_inputs.masked_fill(~context.valid[..., None], 0.0)
        count = time // self.factor if self.causal else -(-time // self.factor)
        groups = F.pad(merge_inputs, (0, 0, 0, max(count * self.factor - time, 0)))[:, : count * self.factor]
        parts = [self.first_key_value(merge_inputs), *([self.merged(groups)] if count else [])]
        keys, values = (torch.cat(t, 1) for t in zip(*parts, strict=True))
        if self.causal and not self.attend.weights.watched:
            return self._attend_grouped(x, keys, values, context)
        at, holes = self._ends(count, x.device), context.valid is not None and not self.causal
        if holes:  # groups without a valid position
            begins = (torch.arange(count + 1, device=x.device) - 1) * self.factor
            at = torch.where(begins < context.lengths[:, None], at, -1)
        return self.look(
            x, keys, values, AttentionMask(self.pattern, self._at(context), at, holes=holes), context.valid
        )

    def _attend_grouped(self, x: Tensor, keys: Tensor, values: Tensor, context: Context) -> Tensor:
        """Compute causal attention without a mask. Queries at the same offset in their groups see one more group than
        the query before, as in plain causal attention, and the `factor` offsets share keys like grouped-query heads."""
        time, f = x.shape[1], self.factor
        q, _ = self.queries(x, self._at(context))
        count = -(-(time + self.offset) // f)
        q = F.pad(q, (0, 0, self.offset, count * f - time - self.offset)).unflatten(2, (count, f))
        q = q.transpose(2, 3).flatten(1, 2)  # (batch, heads * factor, groups, dim)
        keys, values = (t.transpose(1, 2)[:, :, :count] for t in (keys, values))
        at = torch.arange(count, device=x.device)[None]
        y = self.attend(
            q, keys, values, AttentionMask(self.pattern, at, at, from_start=True), self.score, self.position
        )
        y = y.unflatten(1, (self.heads, f)).transpose(2, 3).flatten(2, 3)[:, :, self.offset : self.offset + time]
        return self.out(self.norm(y.transpose(1, 2).flatten(-2), context.valid))

    def _ends(self, groups: int, device: torch.device) -> Tensor:
        """Return (1, 1 + groups): the positions from which the first key and each group are visible."""
        return (torch.arange(groups + 1, device=device) * self.factor - self.offset).clamp(min=0)[None]

    def _at(self, context: Context) -> Tensor:
        return context.positions[:1] if context.from_start else context.positions

    def _check(self, context: Context) -> None:
        if context.pattern is not None:
            raise UserError(
                "compressed attention attends to groups, so it cannot follow a pattern given with the batch"
            )

    def start(self, context: Context, capacity: int) -> Groups:
        batch, like = context.positions.shape[0], self.squeeze.weight
        slots = capacity // self.factor + 2
        keys, values = (like.new_zeros(batch, slots, self.heads, dim) for dim in (self.key_dim, self.dim))
        if self.first_key is not None:
            here = torch.zeros(batch, 1, dtype=torch.long, device=like.device)
            key, value = self.first_key_value(like.new_zeros(batch, 1, self.channels))
            keys, values = write(keys, here, key), write(values, here, value)
        return Groups(keys, values, like.new_zeros(batch, self.factor - 1, self.channels))

    def step(self, x: Tensor, state: Groups, context: Context) -> tuple[Tensor, Groups]:
        if not self.causal:
            raise UserError("compressed attention with causal = false needs the whole sequence, so it does not step")
        self._check(context)
        f, begin, rest = self.factor, context.positions[:, :1], state.rest
        keys, values = (grow_slots(tensor, 1 + (context.last_position + 1) // f) for tensor in state[:2])
        slots = keys.shape[1] - 2
        merge_inputs = self.merge_inputs(x)
        if self.first_key is None and bool((begin == 0).any()):
            slot = torch.where((begin == 0) & (context.lengths[:, None] > 0), 0, slots + 1)
            key, value = self.first_key_value(merge_inputs)
            keys, values = write(keys, slot, key), write(values, slot, value)
        joined = torch.cat((rest, merge_inputs), 1)
        ended = (begin[:, 0] + context.lengths) // f - begin[:, 0] // f  # (batch,) groups completed by this step
        count = int(ended.max())
        if count:
            at = f - 1 - begin % f + torch.arange(count * f, device=x.device)  # (batch, count * factor)
            new_keys, new_values = self.merged(_gather(joined, at.clamp(max=joined.shape[1] - 1)))
            number = torch.arange(count, device=x.device)
            slot = torch.where(number < ended[:, None], 1 + begin // f + number, slots + 1)
            keys, values = write(keys, slot, new_keys), write(values, slot, new_values)
        rest = _gather(joined, context.lengths[:, None] + torch.arange(f - 1, device=x.device))
        count = max(context.last_position + self.offset, 0) // f + 1
        mask = AttentionMask(self.pattern, context.positions, self._ends(count - 1, x.device))
        y = self.look(x, keys[:, :count], values[:, :count], mask, context.valid)
        return y, Groups(keys, values, rest)

    def cost(self, length: int, past: int = 0) -> Cost:
        f, inner, whole = self.factor, self.heads * self.dim, past + length
        groups = whole // f - past // f if self.causal else -(-length // f)
        unmerged = length if self.compress == "keys" else groups + (self.first_key is None and not past)
        projections = length * (self.q.weight.numel() + self.out.weight.numel())
        projections += unmerged * (self.k.weight.numel() + self.v.weight.numel())
        convolutions = groups * self.squeeze.weight.numel() * (2 if self.compress == "keys" else 1)
        seen = [1 + (i + self.offset) // f for i in range(past, whole)] if self.causal else [1 + groups] * length
        flops = (
            2 * (projections + convolutions) + 4 * inner * sum(seen) + self.score.flops(length, groups + 1, sum(seen))
        )
        size = self.squeeze.weight.element_size()
        kept = (whole // f + 2) * self.heads * (self.key_dim + self.dim) + (f - 1) * self.channels
        return Cost(flops, kept * size if self.causal else 0)

    def growth(self) -> Growth:
        return Growth(f"n²/{self.factor}·d", "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from super().value_path()
        yield self.squeeze.weight


def _gather(x: Tensor, at: Tensor) -> Tensor:
    """Gather x (batch, time, channels) at indices (batch, n): (batch, n, channels)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
