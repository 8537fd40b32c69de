"""Memory-compressed attention: every few keys and values are one, made by a convolution that jumps from group to group,
so that a query looks at a third as many.

    k'_g = sum over r < f of  C_r k_(f g + r) + b          and v' the same, with C and b learned
    y_i  = softmax over {a} and the groups g that i may see of (q_i . k' / sqrt(dim))  v'

A causal query sees a group once it is complete. Before the first is, there is something that all may see: a learned key
and value, or the first position itself. What came since the last complete group nobody sees, so that these layers stand
between layers of local attention.

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
    """What all may see, the groups that are complete, and the beginning of the next one."""

    keys: Tensor  # (batch, groups + 2, heads, dim): what all may see, the groups, and a slot for what is not one
    values: Tensor  # the same
    rest: Tensor  # (batch, factor - 1, channels), the last inputs of the convolution, the newest at the end


class Compressed(MultiHead):
    """factor:  positions that become one.
    compress: "keys": keys and values, each head's channels for themselves; "input": what keys and values are made of,
              all channels together (tensor2tensor).
    first:    what every query sees: "learned", a key and a value of their own; "position", the first one.
    causal:   a query sees the groups that ended before it or with it; else all of them.
    strict:   only those that ended before it (tensor2tensor).
    dim:      channels of a head; None: width / heads.
    score:    how a query and a key are compared.
    bias:     the maps q, k, v, o that have one: True all, False none, or their letters.
    norm:     on the heads' output before the last map.
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
        self.factor, self.compress, self.causal, self.ahead = factor, compress, causal, 0 if strict else 1
        inner = heads * self.dim
        channels, groups = (inner, heads) if compress == "keys" else (width, 1)
        self.squeeze = nn.Conv1d(channels, channels, factor, stride=factor, groups=groups)
        made = [nn.Parameter(torch.empty(inner).normal_(std=self.dim**-0.5)) for _ in range(2 * (first == "learned"))]
        self.first_key, self.first_value = made or (None, None)

    @property
    def channels(self) -> int:
        """Of what is gathered into groups: keys and values side by side, or the input."""
        return 2 * self.heads * self.dim if self.compress == "keys" else self.width

    def gathered(self, x: Tensor) -> Tensor:
        """x (batch, time, width) -> (batch, time, channels)"""
        return torch.cat((self.k(x), self.v(x)), -1) if self.compress == "keys" else x

    def squeezed(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Whole groups (batch, positions, channels) -> keys and values (batch, groups, heads, dim)."""
        if self.compress == "input":
            return self.mapped(self.squeeze(groups.mT).mT)
        both = torch.cat(groups.chunk(2, -1))  # keys of all rows, then values of all rows
        return self._heads(*self.squeeze(both.mT).mT.chunk(2))

    def mapped(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, n, channels) as it is -> keys and values (batch, n, heads, dim)."""
        if self.compress == "input":
            return self._heads(self.k(gathered), self.v(gathered))
        return self._heads(*gathered.chunk(2, -1))

    def _heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (t.unflatten(-1, (self.heads, self.dim)) for t in (keys, values))
        return self.score.key(keys.transpose(1, 2)).transpose(1, 2), values

    def seen_by_all(self, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 1, heads, dim), from what is gathered at the first position."""
        if self.first_key is None:
            return self.mapped(gathered[:, :1])
        batch = gathered.shape[0]
        return self._heads(*(t.expand(batch, 1, -1) for t in (self.first_key, self.first_value)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self._check(context)
        time, gathered = x.shape[1], self.gathered(x)
        if context.valid is not None and not self.causal:
            gathered = gathered.masked_fill(~context.valid[..., None], 0.0)
        count = time // self.factor if self.causal else -(-time // self.factor)
        whole = F.pad(gathered, (0, 0, 0, max(count * self.factor - time, 0)))[:, : count * self.factor]
        parts = [self.seen_by_all(gathered), *([self.squeezed(whole)] if count else [])]
        keys, values = (torch.cat(t, 1) for t in zip(*parts, strict=True))
        if self.causal and not self.attend.weights.watched:
            return self._side_by_side(x, keys, values, context)
        at, holes = self._ends(count, x.device), context.valid is not None and not self.causal
        if holes:  # groups without a real position
            begins = (torch.arange(count + 1, device=x.device) - 1) * self.factor
            at = torch.where(begins < context.lengths[:, None], at, -1)
        return self.look(
            x, keys, values, AttentionMask(self.pattern, self._at(context), at, holes=holes), context.valid
        )

    def _side_by_side(self, x: Tensor, keys: Tensor, values: Tensor, context: Context) -> Tensor:
        """Causal attention with no mask: queries at the same place in their groups see one group more from one to the
        next, as plain causal attention does, and all such places share keys as grouped heads do."""
        time, f = x.shape[1], self.factor
        q, _ = self.queries(x, self._at(context))
        count = -(-(time + self.ahead) // f)
        q = F.pad(q, (0, 0, self.ahead, count * f - time - self.ahead)).unflatten(2, (count, f))
        q = q.transpose(2, 3).flatten(1, 2)  # (batch, heads * factor, groups, dim)
        keys, values = (t.transpose(1, 2)[:, :, :count] for t in (keys, values))
        at = torch.arange(count, device=x.device)[None]
        y = self.attend(
            q, keys, values, AttentionMask(self.pattern, at, at, from_start=True), self.score, self.position
        )
        y = y.unflatten(1, (self.heads, f)).transpose(2, 3).flatten(2, 3)[:, :, self.ahead : self.ahead + time]
        return self.out(self.norm(y.transpose(1, 2).flatten(-2), context.valid))

    def _ends(self, groups: int, device: torch.device) -> Tensor:
        """(1, 1 + groups): where what all may see stands, and from where on each group is seen."""
        return (torch.arange(groups + 1, device=device) * self.factor - self.ahead).clamp(min=0)[None]

    def _at(self, context: Context) -> Tensor:
        return context.positions[:1] if context.from_start else context.positions

    def _check(self, context: Context) -> None:
        if context.pattern is not None:
            raise UserError("compressed attention sees groups, so it cannot follow a pattern given with the batch")

    def start(self, context: Context, capacity: int) -> Groups:
        batch, like = context.positions.shape[0], self.squeeze.weight
        slots = capacity // self.factor + 2
        keys, values = (like.new_zeros(batch, slots, self.heads, dim) for dim in (self.key_dim, self.dim))
        if self.first_key is not None:
            here = torch.zeros(batch, 1, dtype=torch.long, device=like.device)
            key, value = self.seen_by_all(like.new_zeros(batch, 1, self.channels))
            keys, values = write(keys, here, key), write(values, here, value)
        return Groups(keys, values, like.new_zeros(batch, self.factor - 1, self.channels))

    def step(self, x: Tensor, state: Groups, context: Context) -> tuple[Tensor, Groups]:
        if not self.causal:
            raise UserError("compressed attention with causal = false needs the whole sequence, so it does not step")
        self._check(context)
        f, begin, rest = self.factor, context.positions[:, :1], state.rest
        keys, values = (grow_slots(tensor, 1 + (context.last_position + 1) // f) for tensor in state[:2])
        slots = keys.shape[1] - 2
        gathered = self.gathered(x)
        if self.first_key is None and bool((begin == 0).any()):
            slot = torch.where((begin == 0) & (context.lengths[:, None] > 0), 0, slots + 1)
            key, value = self.seen_by_all(gathered)
            keys, values = write(keys, slot, key), write(values, slot, value)
        joined = torch.cat((rest, gathered), 1)
        ended = (begin[:, 0] + context.lengths) // f - begin[:, 0] // f  # (batch,) groups that are complete now
        count = int(ended.max())
        if count:
            at = f - 1 - begin % f + torch.arange(count * f, device=x.device)  # (batch, count * factor)
            new_keys, new_values = self.squeezed(_pick(joined, at.clamp(max=joined.shape[1] - 1)))
            number = torch.arange(count, device=x.device)
            slot = torch.where(number < ended[:, None], 1 + begin // f + number, slots + 1)
            keys, values = write(keys, slot, new_keys), write(values, slot, new_values)
        rest = _pick(joined, context.lengths[:, None] + torch.arange(f - 1, device=x.device))
        known = max(context.last_position + self.ahead, 0) // f + 1
        see = AttentionMask(self.pattern, context.positions, self._ends(known - 1, x.device))
        y = self.look(x, keys[:, :known], values[:, :known], see, context.valid)
        return y, Groups(keys, values, rest)

    def cost(self, length: int, past: int = 0) -> Cost:
        f, inner, whole = self.factor, self.heads * self.dim, past + length
        groups = whole // f - past // f if self.causal else -(-length // f)
        mapped = length if self.compress == "keys" else groups + (self.first_key is None and not past)
        maps = length * (self.q.weight.numel() + self.out.weight.numel())
        maps += mapped * (self.k.weight.numel() + self.v.weight.numel())
        squeezes = groups * self.squeeze.weight.numel() * (2 if self.compress == "keys" else 1)
        seen = [1 + (i + self.ahead) // f for i in range(past, whole)] if self.causal else [1 + groups] * length
        flops = 2 * (maps + squeezes) + 4 * inner * sum(seen) + self.score.flops(length, groups + 1, sum(seen))
        size = self.squeeze.weight.element_size()
        kept = (whole // f + 2) * self.heads * (self.key_dim + self.dim) + (f - 1) * self.channels
        return Cost(flops, kept * size if self.causal else 0)

    def growth(self) -> Growth:
        return Growth(f"n²/{self.factor}·d", "1", "1")

    def value_path(self) -> Iterator[Tensor]:
        yield from super().value_path()
        yield self.squeeze.weight


def _pick(x: Tensor, at: Tensor) -> Tensor:
    """x (batch, time, channels) at places (batch, n) -> (batch, n, channels)"""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
