"""The contract of mixers, which move information between positions or act on each position alone.

However a sequence is cut into steps, the output is the same:

    y_1, s_1 = step(x_1, start);  y_2, s_2 = step(x_2, s_1);  ...      [y_1 y_2 ...] == forward([x_1 x_2 ...])
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from .context import Context, Steps
from .fusion import FusedAttention, FusedMlp

S = TypeVar("S")


class Cost(NamedTuple):
    """The cost of a step for one sequence."""

    flops: int  # of matrix products, two per multiply-add
    state: int  # bytes of the state


class Growth(NamedTuple):
    """The three columns of Table 1 of Vaswani et al. 2017, with n positions and width d."""

    complexity: str  # per layer
    sequential: str  # operations that cannot run in parallel
    path: str  # maximum path length between two positions

    def combine(self, other: "Growth") -> "Growth":
        """Return the growth of two mixers in parallel."""
        joins = ("{} + {}", "max({}, {})", "min({}, {})")
        return Growth(*(a if a == b else join.format(a, b) for join, a, b in zip(joins, self, other, strict=True)))


class Empty(NamedTuple):
    """The state of a mixer without memory."""


class Mixer(Steps, Generic[S]):
    """Takes the next n >= 1 positions of every row and continues from the state.

    `step` may write into the buffers of its state, after the positions that this state holds: the model makes sure that
    no other state needs them (state.py). A state grows beyond the capacity that `start` was given.

    width:     input channels; out_width: output channels, the same by default.
    streams:   False when the whole sequence is needed at once; then only `forward` is called.
    exports_state: in an encoder, its last state is passed to the decoder (`Memory.final_states`).
    uses_layer_outputs: it reads `Memory.layer_outputs`, which the encoder then provides.
    limit:     the longest sequence that it can take; None: any.
    restarts:  it counts positions anew inside, so that the limits of its submodules do not limit the sequence.
    examples:  arguments of the variants that the laws test; () means that the defaults are enough.
    """

    folder: ClassVar[tuple[str, ...]] = ("mixers", "feedforwards")
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    streams: bool = True
    exports_state: bool = False
    uses_layer_outputs: bool = False
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
        """Return the empty state for the rows of `context`, with a capacity of `capacity` positions."""

    @abstractmethod
    def step(self, x: Tensor, state: S, context: Context) -> tuple[Tensor, S]:
        """x (batch, time, width) -> (batch, time, out_width), and the state after it."""

    def fused(self) -> FusedAttention | FusedMlp | None:
        """Return a description of a step of one position, for a kernel that runs all layers in one call; None where the
        kernel cannot do it. `step` gives the same output."""
        return None

    def can_return(self, begin: int, end: int) -> bool:
        """Return whether a state of `begin` positions is still intact after its buffers were written up to `end`."""
        return True

    def reorder(self, state: S, rows: Tensor, shared: dict) -> S:
        """Return `select(state, rows)`, and give `state` up, so that a mixer need not copy it. shared: what the layers
        of a stack found out for the same rows, for mixers that can use it again."""
        return select(state, rows)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Process the whole sequence in one step from the empty state. Overridden only for speed."""
        return self.step(x, self.start(context, x.shape[1]), context)[0]

    @abstractmethod
    def cost(self, length: int, past: int = 0) -> Cost:
        """Return the cost of a step of `length` positions after `past` others."""

    def growth(self) -> Growth:
        """Return how the work grows with the length, as in Table 1 of the 2017 paper."""
        return Growth("n·d²", "1", "∞")

    def value_path(self) -> Iterator[Tensor]:
        """Yield the weights between input values and output, which DeepNorm scales at initialization."""
        return iter(())


class Pointwise(Mixer[Empty]):
    """A mixer that treats every position alone, such as a feed-forward. Subclasses define `forward` and `cost`."""

    def start(self, context: Context, capacity: int) -> Empty:
        return Empty()

    def step(self, x: Tensor, state: Empty, context: Context) -> tuple[Tensor, Empty]:
        return type(self).forward(self, x, context), state  # its hooks have run for the step already: see `Steps`

    @abstractmethod
    def forward(self, x: Tensor, context: Context) -> Tensor: ...


def map_tensors(state: Any, change: Any) -> Any:
    """Return the state with `change` applied to every tensor in it."""
    if isinstance(state, Tensor):
        return change(state)
    if not isinstance(state, tuple):
        return state
    parts = [map_tensors(part, change) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def select(state: Any, rows: Tensor) -> Any:
    """Return the state of the given rows, in that order, repeats allowed: beams, eviction, continuous batching. A state
    may define a cheaper `select` of its own."""
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if state is None:
        return None
    if hasattr(state, "select"):
        return state.select(rows)
    parts = [select(part, rows) for part in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def join(states: Sequence[Any]) -> Any:
    """Return one state with the rows of all these states, which may stand at different positions: sequences enter a
    batch. Shorter tensors are padded with zeros; a state that needs other padding defines a `join` of its own."""
    first = states[0]
    if first is None:
        return None
    if isinstance(first, Tensor):
        return pad_and_cat(states)
    if hasattr(first, "join"):
        return first.join(states)
    parts = [join(part) for part in zip(*states, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)


def pad_and_cat(tensors: Sequence[Tensor], value: int = 0) -> Tensor:
    """Concatenate along the batch, after padding the other dimensions to the largest sizes with `value`."""
    shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        more = [large - size for large, size in zip(shape, tensor.shape[1:], strict=True)]
        edges = [edge for lack in reversed(more) for edge in (0, lack)]
        padded.append(nn.functional.pad(tensor, edges, value=value) if any(more) else tensor)
    return torch.cat(padded)


def same_layout(state: Any, small: Any, large: Any) -> bool:
    """Return whether a state has the types and sizes of two others that differ in their capacity, apart from the sizes
    that depend on batch and capacity."""
    if isinstance(state, Tensor) and isinstance(small, Tensor):
        if state.dim() != small.dim() or state.dtype != small.dtype:
            return False
        sizes = zip(state.shape[1:], small.shape[1:], large.shape[1:], strict=True)
        return all(size == one or one != other for size, one, other in sizes)
    if type(state) is not type(small) or not isinstance(state, tuple):
        return state is None and small is None
    return len(state) == len(small) and all(same_layout(*parts) for parts in zip(state, small, large, strict=True))


def state_bytes(state: Any) -> int:
    """Return the bytes that a state holds."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_tensors(state, add)
    return total


def keep_rows(context: Context, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` (batch, ...) for the rows that have a real column in this step, and `old` for the others."""
    if context.valid is None:
        return new
    alive = context.lengths > 0
    return torch.where(alive.view(-1, *[1] * (new.dim() - 1)), new, old)
