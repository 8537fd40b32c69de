"""A step cut at the ends of segments, for mixers that do something there. Rows of a batch stand at different places, so
each takes its own columns, and all take turns together: as many as the row that crosses most ends.

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
    """What every row takes at once: `size` columns, or fewer, down to none."""

    where: slice | Tensor  # the columns of the step, (batch, size) when they differ from row to row
    size: int
    count: Tensor  # (batch,) how many are real
    begin: Tensor  # (batch,) the place of the first one in its row's sequence
    inside: Tensor  # (batch,) and in its segment
    end: int  # the most of inside + count
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
    """All columns of a step, at least one turn."""
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
    """What each turn takes of x (batch, time, ...): (batch, size, ...) each. All at once, so that their gradients are
    put together once, and not added up over the whole of x for every turn."""
    if isinstance(made[0].where, Tensor):
        where = torch.cat([turn.where for turn in made if isinstance(turn.where, Tensor)], 1)
        x = x.gather(1, where.view(*where.shape, *[1] * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
    return x.split([turn.size for turn in made], 1)


def pieces(x: Tensor, context: Context, size: int) -> Iterator[tuple[Tensor, Context]]:
    """A step x (batch, time, ...) in pieces of so many columns, each with its context, which all layers share."""
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
        column = torch.where(turn.valid, turn.where, time)  # beyond the end: nobody's
        places = (base + turn.columns).expand_as(column)
        index = torch.cat((index, index[:, :1]), 1).scatter(1, column, places)[:, :time]
        base += turn.size
    return together.gather(1, index[..., None].expand(-1, -1, together.shape[-1]))
