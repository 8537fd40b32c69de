"""Recurrent memory: a stack processes one segment after the other, and a few memory vectors are carried between them.

    [ _ ; Y_t ; M_(t+1) ] = stack([ M_t ; X_t ; M_t ])          M_1 is learned

The memory before a segment is read by all of its positions. The memory after it sees the whole segment, and its output
is the memory of the next segment. Bulatov et al. 2022, "Recurrent Memory Transformer", arXiv:2207.06881.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.bases.cache import Cache
from regard.bases.segments import Turn, cut, join, turns
from regard.core import Context, Cost, Growth, Mixer, Norm, Place, Position, Stack, UserError, part
from regard.schema import make, name_of


class MemoryState(NamedTuple):
    """The memory of the current segment, and the state of the stack within it."""

    memory: Tensor  # (batch, memory, width)
    inner: tuple


class RecurrentMemory(Mixer[MemoryState]):
    """A stack inside one mixer: use it alone in a layer, with wiring "plain".

    layer, depth, norm, share: of the inner stack, as in a model.
    segment:  positions in a segment.
    memory:   number of memory vectors.
    position: position added to the vectors of [memory; segment; memory], counted from 0: learned, sinusoidal. Positions
              that act in attention are named there, and count in the same way.
    """

    restarts = True
    examples = (
        {
            "segment": 5,
            "memory": 2,
            "layer": [{"mixer": "attention", "feedforward": {"part": "mlp", "hidden": 20}, "wiring": "pre"}],
            "norm": "layer",
            "position": {"part": "learned", "length": 9},
        },
        {
            "segment": 64,
            "memory": 1,
            "depth": 1,
            "layer": {"mixer": {"part": "attention", "kv_heads": 1, "position": "rotary"}, "wiring": "post"},
        },
        {"segment": 3, "memory": 1, "depth": 1, "layer": {"mixer": "gru", "wiring": "pre"}},
        {"segment": 1, "memory": 3, "depth": 1, "layer": {"mixer": "attention", "wiring": "pre"}, "norm": "rms"},
    )

    def __init__(
        self,
        width: int,
        layer: list | dict,
        heads: int = 1,
        depth: int = 1,
        segment: int = 512,
        memory: int = 10,
        norm: Norm | str | dict = "none",
        position: Position | str | dict = "none",
        share: str = "none",
        dropout: float = 0.0,
        place: Place | None = None,
    ):
        super().__init__()
        if segment < 1 or memory < 1:
            raise UserError(f"segment and memory must be at least 1, not {segment} and {memory}")
        self.width, self.segment, self.count = width, segment, memory
        self.position = part(Position, position, width=width, dim=width, heads=1)
        if any(self.position.acts(where) for where in ("query", "key", "bias", "output_bias")):
            raise UserError(f"position '{name_of(self.position)}' acts in attention: name it there")
        table = {"layer": layer, "depth": depth, "norm": norm, "share": share}
        inherited = {"width": width, "heads": heads, "dropout": dropout, "place": Place(decoder=depth)}
        self.stack = make(Stack, table, inherited, "recurrent_memory")
        self.stack.check_streams()
        if self.stack.width != width:
            raise UserError(
                f"the layers change width {width} to {self.stack.width}, and the memory needs the same width"
            )
        for inner in self.modules():
            if isinstance(inner, Position) and inner.limit is not None and inner.limit < self.span:
                raise UserError(
                    f"position '{name_of(inner)}' has {inner.limit} positions, and a segment with memory {self.span}"
                )
        self.memory = nn.Parameter(torch.empty(memory, width).normal_(std=width**-0.5))

    @property
    def span(self) -> int:
        """The number of positions of [memory; segment; memory]."""
        return self.segment + 2 * self.count

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Compute segment by segment from the first position, each in one forward pass of the stack."""
        if context.pattern is not None:
            raise UserError(
                "the memory holds all positions, so recurrent_memory cannot follow a pattern given with the batch"
            )
        memory, outputs = self.memory.expand(len(x), -1, -1), []
        for begin, piece in zip(range(0, x.shape[1], self.segment), x.split(self.segment, 1), strict=True):
            last = begin + self.segment >= x.shape[1]
            whole = torch.cat((memory, piece) if last else (memory, piece, memory), 1)
            valid = None
            if context.valid is not None:
                real = (context.lengths - begin).clamp(0, self.segment)
                real = torch.where(real == self.segment, self.span, real + self.count)
                valid = torch.arange(whole.shape[1], device=x.device) < real[:, None]
            inner = Context.begin(*whole.shape[:2], x.device, valid=valid)
            y = self.stack(self.position.embed(whole, inner.positions[:1]), inner)
            outputs.append(y[:, self.count : self.count + piece.shape[1]])
            memory = y[:, self.count + piece.shape[1] :]
        return torch.cat(outputs, 1)

    def start(self, context: Context, capacity: int) -> MemoryState:
        batch = context.positions.shape[0]
        return MemoryState(self.memory.expand(batch, -1, -1), self._start_inner(batch))

    def _start_inner(self, batch: int) -> tuple:
        return self.stack.start(Context.begin(batch, 0, self.memory.device), self.span)

    def step(self, x: Tensor, state: MemoryState, context: Context) -> tuple[Tensor, MemoryState]:
        made, outputs = turns(context, self.segment), []
        for turn, own in zip(made, cut(x, made), strict=True):
            opening = (turn.count > 0) & (turn.inside == 0)
            if bool(opening.any()):
                state = self._open(state, opening, turn)
            y, inner = self._run(own, state.inner, self.count + turn.inside, turn.valid)
            state = state._replace(inner=inner)
            outputs.append(y)
        return join(outputs, made, context), state

    def _open(self, state: MemoryState, rows: Tensor, turn: Turn) -> MemoryState:
        """Start a segment for these rows (batch,): write the previous one into the memory, and let the new one read
        it."""
        memory, filled = state.memory, torch.full_like(turn.begin, self.segment)
        later = rows & (turn.begin > 0)
        if bool(later.any()):
            memory = where_rows(later, self.write(state, filled, later), memory)
        inner = where_rows(rows, self._start_inner(len(rows)), state.inner)
        return MemoryState(memory, self._run(memory, inner, torch.zeros_like(filled), rows[:, None])[1])

    def write(self, state: MemoryState, filled: Tensor, rows: Tensor) -> Tensor:
        """Return the memory (batch, memory, width) after a segment of `filled` (batch,) positions, for the chosen
        rows."""
        return self._run(state.memory, state.inner, self.count + filled, rows[:, None])[0]

    def _run(self, x: Tensor, inner: tuple, begin: Tensor, valid: Tensor) -> tuple[Tensor, tuple]:
        context = Context.after(begin, x.shape[1], valid=valid.expand(x.shape[:2]))
        return self.stack.step(self.position.embed(x, context.positions), inner, context)

    def cost(self, length: int, past: int = 0) -> Cost:
        calls: Counter[tuple[int, int]] = Counter()  # number of stack steps by (length, past)
        at, end = past, past + length
        while at < end:
            inside = at % self.segment
            if inside == 0:
                calls[self.count, 0] += 1
                calls[self.count, self.count + self.segment] += at > 0
            new = min(self.segment - inside, end - at)
            calls[new, self.count + inside] += 1
            at += new
        flops = sum(times * self.stack.cost(*call).flops for call, times in calls.items())
        return Cost(flops, self.memory.numel() * self.memory.element_size() + self.stack.cost(self.span).state)

    def growth(self) -> Growth:
        return Growth(f"n·{self.span}·d", f"n/{self.segment}", f"n/{self.segment}")


def where_rows(rows: Tensor, one: Any, two: Any) -> Any:
    """Return the state `one` for these rows (batch,), and `two` for the others."""
    if isinstance(one, Tensor):
        return torch.where(rows.view(-1, *[1] * (one.dim() - 1)), one, two)
    if one is None:
        return None
    if isinstance(one, Cache):  # a cache from which rows were selected may be shorter
        one, two = one.widen(two.capacity), two.widen(one.capacity)
    parts = [where_rows(rows, *pair) for pair in zip(one, two, strict=True)]
    return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
