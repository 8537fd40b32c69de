"""What a layer is given besides its input: positions, padding, and the encoder's output."""

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
    """The output of an encoder, as its decoder reads it."""

    x: Tensor  # (batch, source, width)
    valid: Tensor | None = None  # (batch, source), True for real columns; None: all are real
    final_states: tuple = ()  # of the encoder's recurrent mixers, in order
    layer_outputs: tuple[Tensor, ...] = ()  # one per encoder layer, only where a mixer uses them


@dataclass
class Call:
    """A step that is taken by calling the module, so that its hooks run: see hooks.py."""

    module: nn.Module
    state: Any  # before the step; after the step once `taken` is True
    taken: bool = False


@dataclass
class Collected:
    """What a stack collects beside its output: see `Stack.forward_with_states`."""

    final_states: list = field(default_factory=list)  # of the mixers with `exports_state`
    layer_outputs: list[Tensor] | None = None  # the stack's output if it ended after each layer; None: not wanted


@dataclass(frozen=True)
class Context:
    """What holds for all layers in one step.

    positions: (batch, time), the position of every column in its row's sequence, counted from 0.
    valid:     (batch, time), True...True False...False in each row: rows may be shorter than the step.
               An invalid column changes no state and is never attended to. None: all columns are real.
    from_start: the step begins at the empty state, so positions are 0, 1, 2, ... in every row.
    memory:    the encoder's output, for cross-attention.
    pattern:   restricts every self-attention of this batch further (packed documents, a graph).
    segments:  (batch, time), segment ids for embeds that use them.
    cache:     values that layers share within this step: see `cached`.
    call:      the call that takes this step, where a module has hooks.
    collected: where a stack puts what is wanted beside its output.
    """

    positions: Tensor
    valid: Tensor | None = None
    from_start: bool = False
    memory: Memory | None = None
    pattern: Pattern | None = None
    segments: Tensor | None = None
    cache: dict = field(default_factory=dict, repr=False, compare=False)
    call: Call | None = field(default=None, repr=False, compare=False)
    collected: Collected | None = field(default=None, repr=False, compare=False)

    @classmethod
    def begin(cls, batch: int, time: int, device: torch.device | str = "cpu", **fields) -> Context:
        """Return the context of whole sequences from position 0."""
        positions = torch.arange(time, device=device).expand(batch, time)
        return cls(positions, from_start=True, **fields)

    @classmethod
    def after(cls, lengths: Tensor, time: int, **fields) -> Context:
        """Return the context of the next `time` columns of rows that already hold `lengths` (batch,) positions."""
        return cls(lengths[:, None] + torch.arange(time, device=lengths.device), **fields)

    def columns(self, begin: int, end: int) -> Context:
        """Return the context of some columns of the step, to be taken after the columns before them."""
        cut = [None if t is None else t[:, begin:end] for t in (self.positions, self.valid, self.segments)]
        positions, valid, segments = cut
        assert positions is not None
        return replace(self, positions=positions, valid=valid, segments=segments, from_start=False, cache={})

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return `compute()`, which depends on `key` and on this step's positions alone, and compute it once."""
        if torch.compiler.is_exporting():  # sizes are symbolic there and cannot be keys
            return compute()
        key = (key, id(self.positions), id(self.valid))
        if key not in self.cache:
            self.cache[key] = (compute(), self.positions, self.valid)  # keeps both tensors alive, so ids stay unique
        return self.cache[key][0]

    @cached_property
    def lengths(self) -> Tensor:
        """(batch,) the number of real columns of this step in each row."""
        batch, time = self.positions.shape
        if self.valid is None:
            return torch.full((batch,), time, device=self.positions.device)
        return self.valid.sum(1)

    @cached_property
    def last_position(self) -> int:
        """The largest real position of the step; the device is synchronized once for all layers."""
        if self.from_start:
            return self.positions.shape[1] - 1
        ends = self.positions[:, 0] + self.lengths - 1
        return int(ends.max())

    @cached_property
    def marked_positions(self) -> Tensor:
        """(batch or 1, time) positions, with -1 for columns that are not real."""
        at = self.positions[:1] if self.from_start else self.positions
        return at if self.valid is None else torch.where(self.valid, at, -1)


def check_valid(valid: Tensor, batch: int, time: int, name: str = "valid") -> None:
    """Refuse a mask in which a row's real columns do not all come first (left padding, holes)."""
    if valid.dtype != torch.bool or valid.shape != (batch, time):
        raise UserError(
            f"{name} must be a bool tensor of shape ({batch}, {time}), not {valid.dtype} {tuple(valid.shape)}"
        )
    if torch.compiler.is_exporting():  # an exported graph cannot depend on values
        return
    if time > 1 and bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        raise UserError(f"{name} has a real column after a padded one: pad on the right, never on the left or between")
