"""The contract of everything that moves information between positions, and of everything that acts on each alone.

However a sequence is cut into steps, the output is the same:

    y_1, s_1 = step(x_1, start);  y_2, s_2 = step(x_2, s_1);  ...      [y_1 y_2 ...] == forward([x_1 x_2 ...])
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .context import Context
from .fusion import FusedAttention, FusedMlp
from .hooks import Steps

S = TypeVar("S")


class Cost(NamedTuple):
    """What a step takes for one sequence."""

    flops: int  # of matrix products, two per multiply-add
    state: int  # bytes that must be kept to go on


class Growth(NamedTuple):
    """The three columns of Table 1 of Vaswani et al. 2017, with n positions and width d."""

    complexity: str  # per layer
    sequential: str  # operations that cannot run side by side
    path: str  # the longest way between two positions

    def beside(self, other: "Growth") -> "Growth":
        """Of two mixers side by side."""
        joins = ("{} + {}", "max({}, {})", "min({}, {})")
        return Growth(*(a if a == b else join.format(a, b) for join, a, b in zip(joins, self, other, strict=True)))


class Empty(NamedTuple):
    """The state of something that remembers nothing."""


class Mixer(Steps, Generic[S]):
    """Takes the next n >= 1 positions of every row and carries on from the state.

    `step` may write into the buffers of the state that it is given, behind the positions that this one holds: the model
    sees to it that no other state is harmed (state.py). Beyond the capacity that `start` was told, a state grows.

    width:     channels in; out_width: channels out, the same unless said.
    streams:   False when the whole sequence is needed at once; then only `forward` is called.
    summary:   its last state is offered to the decoder when it stands in an encoder.
    views:     it chooses among the layers of the encoder, which then hands over the output of each.
    limit:     the longest sequence that it can take, None when there is none.
    restarts:  counts places anew inside, so that the limits of what it is made of are not those of the sequence.
    examples:  arguments of the variants that the laws try; () means that the defaults are enough.
    """

    folder: ClassVar[tuple[str, ...]] = ("mixers", "feedforwards")
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    streams: bool = True
    summary: bool = False
    views: bool = False
    limit: int | None = None
    restarts: bool = False
    width: int

    @property
    def out_width(self) -> int:
        return self.width

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in; the default one where it has no parameters, as when it was quantized."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @abstractmethod
    def start(self, context: Context, capacity: int) -> S:
        """The empty state for the rows of `context`, with room for `capacity` positions."""

    @abstractmethod
    def step(self, x: Tensor, state: S, context: Context) -> tuple[Tensor, S]:
        """x (batch, time, width) -> (batch, time, out_width), and the state after it."""

    def fused(self) -> FusedAttention | FusedMlp | None:
        """Return what a step of one position does, for a kernel that takes all layers at once; None: it does more than
        a kernel knows. `step` gives the same."""
        return None

    def can_return(self, begin: int, end: int) -> bool:
        """Whether a state of `begin` positions is still whole once its buffers were written up to position `end`."""
        return True

    def reorder(self, state: S, rows: Tensor) -> S:
        """As `select(state, rows)`, but `state` is given up: a mixer may know a cheaper way than to copy it."""
        return select(state, rows)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The whole sequence at once: one step from the start. Overridden only for speed."""
        return self.step(x, self.start(context, x.shape[1]), context)[0]

    @abstractmethod
    def cost(self, length: int, past: int = 0) -> Cost:
        """Of a step of `length` positions after `past` others."""

    def growth(self) -> Growth:
        """How work grows with length, as in the 2017 paper's Table 1."""
        return Growth("n·d²", "1", "∞")

    def value_path(self) -> Iterator[Tensor]:
        """The weights that carry values from input to output: what wirings such as DeepNorm shrink at birth."""
        return iter(())


class Pointwise(Mixer[Empty]):
    """A mixer that treats every position alone: feed-forwards. Subclasses write `forward` and `cost`."""

    def start(self, context: Context, capacity: int) -> Empty:
        return Empty()

    def step(self, x: Tensor, state: Empty, context: Context) -> tuple[Tensor, Empty]:
        return type(self).forward(self, x, context), state  # hooks have seen the step already: see hooks.py

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor: ...


def each(state: Any, change: Any) -> Any:
    """The same state with `change` applied to every tensor in it."""
    if isinstance(state, Tensor):
        return change(state)
    if not isinstance(state, tuple):
        return state
    parts = [each(part, change) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def select(state: Any, rows: Tensor) -> Any:
    """The state of the given rows, in that order, repeats allowed: beams, eviction, continuous batching. A state that
    has a `select` of its own knows a cheaper way than to copy all that it holds."""
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if state is None:
        return None
    if hasattr(state, "select"):
        return state.select(rows)
    parts = [select(part, rows) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def join(states: Sequence[Any]) -> Any:
    """The state of the rows of all these, which may stand at different places of their sequences: sentences enter a
    batch. Where some hold more than others, there is nothing behind these; a state that cannot put 0 there has a `join`
    of its own."""
    first = states[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return under(states)
    if hasattr(first, "join"):
        return first.join(states)
    parts = [join(part) for part in zip(*states, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def under(tensors: Sequence[Tensor], nothing: int = 0) -> Tensor:
    """Rows under rows, as wide as the widest of them."""
    shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    wider = []
    for tensor in tensors:
        more = [wide - size for wide, size in zip(shape, tensor.shape[1:], strict=True)]
        edges = [edge for lack in reversed(more) for edge in (0, lack)]
        wider.append(nn.functional.pad(tensor, edges, value=nothing) if any(more) else tensor)
    return torch.cat(wider)


def alike(state: Any, small: Any, large: Any) -> bool:
    """Whether a state is of the make of two others, which differ in their room: the same names, and the same sizes but
    for those that go with batch and room."""
    if isinstance(state, Tensor) and isinstance(small, Tensor):
        if state.dim() != small.dim() or state.dtype != small.dtype:
            return False
        sizes = zip(state.shape[1:], small.shape[1:], large.shape[1:], strict=True)
        return all(size == one or one != other for size, one, other in sizes)
    if type(state) is not type(small) or not isinstance(state, tuple):
        return state is None and small is None
    return len(state) == len(small) and all(alike(*parts) for parts in zip(state, small, large, strict=True))


def state_bytes(state: Any) -> int:
    """Bytes held by a state."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    each(state, add)
    return total


def keep_rows(context: Context, new: Tensor, old: Tensor) -> Tensor:
    """`new` (batch, ...) for the rows that have a real column in this step, `old` for the others."""
    if context.valid is None:
        return new
    alive = context.lengths > 0
    return torch.where(alive.view(-1, *[1] * (new.dim() - 1)), new, old)
