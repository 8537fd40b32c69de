"""What surrounds a step besides its input: where each row stands, which columns are real, the encoder's memory, and who
watches, by forward hooks or by taps.

torch calls hooks in `module(x)` alone. A module that steps has two ways to the same output, `module(x, context)` and
`module.step(x, state, context)`; `Steps` turns the second into the first where somebody has hooked the module, so that
a hook counts however a sequence is cut. A hook always gets and gives the output, never the state. A tap is a named
no-op: attention weights, losses and hidden states are watched there, without a return value for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.ops.dispatch import hooked

if TYPE_CHECKING:
    from regard.pattern.algebra import Pattern


class Memory(NamedTuple):
    """The output of an encoder, as its decoder reads it."""

    x: Tensor  # (batch, source, width)
    valid: Tensor | None = None  # (batch, source), True for real columns; None: all are real
    final_states: tuple = ()  # of the encoder's recurrent mixers, in order
    layer_outputs: tuple[Tensor, ...] = ()  # one per encoder layer, only where a mixer uses them
    embedded: tuple[Tensor, ...] = ()  # source vectors without and with positions, where a canvas copies them
    copies: Tensor | None = None  # (batch, source) how many positions of a canvas are copies of each source position


@dataclass
class Call:
    """A step that is taken by calling the module, so that its hooks run: see `Steps`."""

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


class Steps(nn.Module):
    """A module with `forward(x, context)` and `step(x, state, context)`, whose hooks run in both."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "step" in vars(cls):
            cls.step = _step_through_call(vars(cls)["step"])  # type: ignore[attr-defined]
        if "forward" in vars(cls):
            cls.forward = _forward_or_step(vars(cls)["forward"])  # type: ignore[method-assign]


def _step_through_call(step: Callable) -> Callable:
    @wraps(step)
    def through_call(self: nn.Module, x: Any, state: Any, context: Context) -> tuple[Any, Any]:
        inside = context.call is not None and context.call.module is self
        if inside or not hooked(self):
            return step(self, x, state, context)
        call = Call(self, state)
        y = self(x, context=replace(context, call=call))
        if not call.taken:
            name = type(self).__name__
            raise UserError(f"the forward of {name} was replaced by one that takes no steps: replace its step as well")
        return y, call.state

    return through_call


def _forward_or_step(forward: Callable) -> Callable:
    @wraps(forward)
    def or_step(self: nn.Module, x: Any, context: Context) -> Tensor:
        call = context.call
        if call is not None and call.module is self and not call.taken:
            call.taken = True
            y, call.state = type(self).step(self, x, call.state, context)  # type: ignore[attr-defined]
            return y
        if not torch.compiler.is_compiling() and hooked(self):  # hooks of a forward that steps inside run once
            context = replace(context, call=Call(self, None, taken=True))
        return forward(self, x, context)

    return or_step


class Tap(nn.Module):
    """Returns its input. A watcher may read it, or replace it by returning a tensor."""

    def __init__(self):
        super().__init__()
        self.watchers: list[Callable[[Tensor], Tensor | None]] = []

    @property
    def watched(self) -> bool:
        return bool(self.watchers)

    def forward(self, x: Tensor) -> Tensor:
        for watcher in self.watchers:
            changed = watcher(x)
            x = x if changed is None else changed
        return x


@contextmanager
def watch(
    model: nn.Module, name: str = "*weights", edit: Callable[[str, Tensor], Tensor | None] | None = None
) -> Iterator:
    """Collect, by tap name, every tensor that passes the taps matching `name` (a shell-style wildcard).

    with watch(model, "decoder*weights") as seen:
        model(...)
    seen["decoder.layers.0.branches.cross.attend.weights"]   # a list, one tensor per call
    """
    seen: dict[str, list[Tensor]] = {}
    added: list[tuple[Tap, Callable]] = []
    for path, tap in model.named_modules():
        if isinstance(tap, Tap) and fnmatch(path, name):

            def watcher(x: Tensor, path: str = path) -> Tensor | None:
                seen.setdefault(path, []).append(x)
                return edit(path, x) if edit else None

            tap.watchers.append(watcher)
            added.append((tap, watcher))
    try:
        yield seen
    finally:
        for tap, watcher in added:
            tap.watchers.remove(watcher)


@contextmanager
def losses(model: nn.Module) -> Iterator[Callable[[], Tensor | float]]:
    """Yield a function that returns the auxiliary loss: the sum of all that passed the model's taps named `loss`, or 0.

    with losses(model) as auxiliary:
        logits = model(tokens)
    (cross_entropy(logits, target) + auxiliary()).backward()
    """
    with watch(model, "loss") as own, watch(model, "*.loss") as inner:

        def total() -> Tensor | float:
            passed = [x for seen in (own, inner) for one in seen.values() for x in one]
            return sum(passed[1:], start=passed[0]) if passed else 0.0

        yield total
