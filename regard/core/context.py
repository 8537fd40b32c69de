"""What a layer may know besides its input: where each row stands, which columns are real, and the encoder's memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import UserError

if TYPE_CHECKING:
    from regard.pattern.algebra import Pattern


class Memory(NamedTuple):
    """What an encoder hands to a decoder."""

    x: Tensor  # (batch, source, width)
    valid: Tensor | None = None  # (batch, source), None: all are real
    finals: tuple = ()  # last states of the encoder's recurrent mixers, in order
    views: tuple[Tensor, ...] = ()  # the output of every encoder layer, for decoders that choose


@dataclass
class Call:
    """A call of a module by which its step is taken: see hooks.py."""

    module: nn.Module
    state: Any  # before the step; once it is taken, after it
    taken: bool = False


@dataclass
class Collected:
    """What a stack leaves beside its output: see `Stack.finish`."""

    finals: list = field(default_factory=list)  # last states of the mixers that offer a summary
    views: list[Tensor] | None = None  # what the stack would give if it ended after each layer; None: nobody asks


@dataclass(frozen=True)
class Context:
    """One step's surroundings.

    positions: (batch, time), the place of every column in its own row's sequence, counted from 0.
    valid:     (batch, time), True...True False...False in each row: rows may be shorter than the step.
               An invalid column leaves every state untouched and nobody looks at it. None: all are real.
    from_start: the step begins at the empty state, so positions are 0, 1, 2, ... in every row.
    memory:    the encoder's output, for mixers that look across.
    pattern:   what this batch adds to every self-attention's own pattern (packed documents, a graph).
    segments:  (batch, time), sentence numbers for embeds that want them.
    known:     what a layer has found out that is the same for others: see `once`.
    call:      the call that this step is a part of, where a module is hooked.
    collected: where a stack leaves what is wanted beside its output.
    """

    positions: Tensor
    valid: Tensor | None = None
    from_start: bool = False
    memory: Memory | None = None
    pattern: Pattern | None = None
    segments: Tensor | None = None
    known: dict = field(default_factory=dict, repr=False, compare=False)
    call: Call | None = field(default=None, repr=False, compare=False)
    collected: Collected | None = field(default=None, repr=False, compare=False)

    @classmethod
    def begin(cls, batch: int, time: int, device: torch.device | str = "cpu", **known) -> Context:
        """The context of a whole sequence from its first position."""
        positions = torch.arange(time, device=device).expand(batch, time)
        return cls(positions, from_start=True, **known)

    @classmethod
    def after(cls, lengths: Tensor, time: int, **known) -> Context:
        """The context of the next `time` columns of rows that already hold `lengths` (batch,) positions."""
        return cls(lengths[:, None] + torch.arange(time, device=lengths.device), **known)

    def columns(self, begin: int, end: int) -> Context:
        """The context of a part of the step, to be taken after the parts before it."""
        cut = [None if t is None else t[:, begin:end] for t in (self.positions, self.valid, self.segments)]
        positions, valid, segments = cut
        assert positions is not None
        return replace(self, positions=positions, valid=valid, segments=segments, from_start=False, known={})

    def once(self, what: Hashable, find: Callable[[], Any]) -> Any:
        """What `find` finds, which depends on `what` and on the places of this step alone; asked for once."""
        if torch.compiler.is_exporting():  # sizes are symbols there, which cannot be keys
            return find()
        key = (what, id(self.positions), id(self.valid))
        if key not in self.known:
            self.known[key] = (find(), self.positions, self.valid)  # these two live as long, so their ids are theirs
        return self.known[key][0]

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) how many columns of this step are real in each row."""
        batch, time = self.positions.shape
        if self.valid is None:
            return torch.full((batch,), time, device=self.positions.device)
        return self.valid.sum(1)

    @cached_property
    def last(self) -> int:
        """The largest real position of the step. Asks the device once, whatever number of layers want it."""
        if self.from_start:
            return self.positions.shape[1] - 1
        ends = self.positions[:, 0] + self.lengths - 1
        return int(ends.max())

    @cached_property
    def marked(self) -> Tensor:
        """(batch or 1, time) positions, with -1 where a column is not real."""
        at = self.positions[:1] if self.from_start else self.positions
        return at if self.valid is None else torch.where(self.valid, at, -1)


def check_valid(valid: Tensor, batch: int, time: int, what: str = "valid") -> None:
    """Real columns come first in each row: anything else (left padding, holes) is refused."""
    if valid.dtype != torch.bool or valid.shape != (batch, time):
        raise UserError(
            f"{what} must be a bool tensor of shape ({batch}, {time}), not {valid.dtype} {tuple(valid.shape)}"
        )
    if torch.compiler.is_exporting():  # a graph cannot ask about numbers
        return
    if time > 1 and bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        raise UserError(f"{what} has a real column after a padded one: pad on the right, never on the left or between")
