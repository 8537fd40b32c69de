"""Cuts a step at segment boundaries. Rows of a batch stand at different positions, so each row takes its own columns in
every turn, and there are as many turns as the row with the most boundaries needs.

    made = turns(context, segment)              the next columns of every row, none beyond the end of its segment
    for turn, own in zip(made, cut(x, made)):   what each turn takes
        y = ... own ...
    join(outputs, made, context)                back in the order of the step
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import Context


class Turn(NamedTuple):
    """The columns that the rows take together: up to `size` in each row."""

    where: slice | Tensor  # the columns of the step, (batch, size) when they differ from row to row
    size: int
    count: Tensor  # (batch,) how many are real
    begin: Tensor  # (batch,) the position of the first one in its row's sequence
    inside: Tensor  # (batch,) and in its segment
    end: int  # the maximum of inside + count
    opens: bool  # all rows stand at the beginning of a segment

    @property
    def columns(self) -> Tensor:
        """(1, size)"""
        return torch.arange(self.size, device=self.count.device)[None]

    @property
    def valid(self) -> Tensor:
        """(batch, size)"""
        return self.columns < self.count[:, None]

    @property
    def at(self) -> Tensor:
        """(batch or 1, size) places in the segment."""
        return self.columns if self.opens else self.inside[:, None] + self.columns


def turns(context: Context, segment: int) -> list[Turn]:
    """Return the turns that cover all columns of a step, at least one."""
    first, lengths, time = context.positions[:, 0], context.lengths, context.positions.shape[1]
    inside = first % segment
    low, high = (0, 0) if context.from_start else (int(end) for end in inside.aminmax())
    made = []
    if low == high:
        begin = 0
        while begin < time:
            end = min(begin + segment - (low + begin) % segment, time)
            count = (lengths - begin).clamp(0, end - begin)
            at = (low + begin) % segment
            made.append(
                Turn(slice(begin, end), end - begin, count, first + begin, inside + at - low, at + end - begin, at == 0)
            )
            begin = end
        return made
    for turn in range(max(int((inside + lengths - 1).max()) // segment, 0) + 1):
        begin = torch.minimum((turn * segment - inside).clamp(min=0), lengths)
        count = torch.minimum((turn + 1) * segment - inside, lengths).sub(begin).clamp(min=0)
        size = max(int(count.max()), 1)
        where = (begin[:, None] + torch.arange(size, device=first.device)).clamp(max=time - 1)
        at = inside if turn == 0 else torch.zeros_like(inside)
        made.append(Turn(where, size, count, first + begin, at, int((at + count).max()), turn > 0))
    return made


def cut(x: Tensor, made: list[Turn]) -> Sequence[Tensor]:
    """Return the columns of x (batch, time, ...) for each turn, (batch, size, ...). They are split in one operation, so
    that the backward pass does not add up a gradient of the size of x for every turn."""
    if isinstance(made[0].where, Tensor):
        where = torch.cat([turn.where for turn in made if isinstance(turn.where, Tensor)], 1)
        x = x.gather(1, where.view(*where.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
    return x.split([turn.size for turn in made], 1)


def pieces(x: Tensor, context: Context, size: int) -> Iterator[tuple[Tensor, Context]]:
    """Split a step x (batch, time, ...) into pieces of `size` columns, with their contexts, which all layers share."""
    begins = range(0, x.shape[1], size)
    contexts = context.cached(("pieces", size), lambda: [context.columns(begin, begin + size) for begin in begins])
    return zip(x.split(size, 1), contexts, strict=True)


def join(outputs: list[Tensor], made: list[Turn], context: Context) -> Tensor:
    """(batch, size, width) of every turn -> (batch, time, width)."""
    together = torch.cat(outputs, 1)
    if isinstance(made[0].where, slice):
        return together
    batch, time = context.positions.shape
    index = torch.zeros(batch, time, dtype=torch.long, device=together.device)
    base = 0
    for turn in made:
        assert isinstance(turn.where, Tensor)
        column = torch.where(turn.valid, turn.where, time)  # beyond the end: dropped
        places = (base + turn.columns).expand_as(column)
        index = torch.cat((index, index[:, :1]), 1).scatter(1, column, places)[:, :time]
        base += turn.size
    return together.gather(1, index[..., None].expand(-1, -1, together.shape[-1]))
