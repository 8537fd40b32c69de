"""The base of recurrent mixers: torch's cells with a batch-first state, the encoder's last states, and attention over
its memory, position by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from regard.core import Context, Cost, Growth, Mixer, Score, Tap, UserError, part
from regard.core.mixer import keep_rows, pad_and_cat
from regard.errors import nearest
from regard.ops.attention import masked_softmax

CELLS = {"lstm": nn.LSTM, "gru": nn.GRU}
BEGIN_STATES = ("zeros", "memory")


class RecurrentState(NamedTuple):
    """The state of a recurrence. With two directions, the forward state and then the backward one."""

    hidden: Tensor  # (batch, layers, directions * hidden)
    cell: Tensor | None  # the same shape, None for a GRU


class Cells(nn.Module):
    """torch's LSTM or GRU, batch first, for steps in which rows may be shorter or have nothing at all.

    dropout: between layers.
    """

    def __init__(self, kind: str, width: int, hidden: int, layers: int = 1, both: bool = False, dropout: float = 0.0):
        super().__init__()
        if kind not in CELLS:
            raise UserError(f"unknown cell '{kind}'{nearest(kind, CELLS)}")
        for name, value in (("hidden", hidden), ("layers", layers)):
            if value < 1:
                raise UserError(f"{name} must be at least 1, not {value}")
        self.kind, self.hidden, self.layers, self.directions = kind, hidden, layers, 2 if both else 1
        self.inner = CELLS[kind](
            width, hidden, layers, batch_first=True, bidirectional=both, dropout=dropout if layers > 1 else 0.0
        )

    @property
    def width(self) -> int:
        return self.directions * self.hidden

    def zeros(self, batch: int) -> RecurrentState:
        hidden = next(self.parameters()).new_zeros(batch, self.layers, self.width)
        return RecurrentState(hidden, torch.zeros_like(hidden) if self.kind == "lstm" else None)

    def begin(self, context: Context, how: str) -> RecurrentState:
        """Zeros, or the last states of the encoder's recurrent mixers: as many layers as there are here, from the top.
        Zeros as well when the encoder is not recurrent."""
        zeros = self.zeros(context.positions.shape[0])
        finals = last_states(context) if how == "memory" else []
        if not finals:
            return zeros
        hidden = torch.cat([last.hidden for last in finals], 1)[:, -self.layers :]
        if hidden.shape != zeros.hidden.shape:
            raise UserError(
                f"the encoder's last states are {hidden.shape[1]} layers of width {hidden.shape[2]}, and {self.layers} "
                f"layers of width {self.width} cannot begin with them: make them equal, or say begin = 'zeros'"
            )
        if self.kind == "gru":
            return RecurrentState(hidden, None)
        cells = [last.cell for last in finals if last.cell is not None]
        if len(cells) < len(finals):
            raise UserError("an lstm cannot begin with the last states of a gru: use one kind, or begin = 'zeros'")
        return RecurrentState(hidden, torch.cat(cells, 1)[:, -self.layers :])

    def forward(self, x: Tensor, last: RecurrentState, context: Context | None = None) -> tuple[Tensor, RecurrentState]:
        """x (batch, time, in) -> (batch, time, directions * hidden). Without a context all columns are real."""
        given = tuple(self._torch(t) for t in last if t is not None)
        packed: Any = x
        if context is not None and context.valid is not None:
            lengths = context.lengths.clamp(min=1).cpu()  # torch takes no empty rows; keep_rows undoes them
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, after = self.inner(packed, given if self.kind == "lstm" else given[0])
        new = [self._ours(t) for t in (after if self.kind == "lstm" else (after,))]
        if packed is x:
            return y, RecurrentState(new[0], new[1] if len(new) > 1 else None)
        assert context is not None
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        kept = [keep_rows(context, t, old) for t, old in zip(new, last, strict=False) if old is not None]
        return y, RecurrentState(kept[0], kept[1] if len(kept) > 1 else None)

    def _torch(self, state: Tensor) -> Tensor:
        """(batch, layers, directions * hidden) -> (layers * directions, batch, hidden)"""
        return state.unflatten(-1, (self.directions, -1)).flatten(1, 2).transpose(0, 1).contiguous()

    def _ours(self, state: Tensor) -> Tensor:
        return state.transpose(0, 1).unflatten(1, (self.layers, -1)).flatten(-2)

    def flops(self, length: int) -> int:
        return 2 * length * sum(p.numel() for name, p in self.inner.named_parameters() if name.startswith("weight"))

    def state(self) -> int:
        """Return the bytes of a row's state."""
        size = next(self.parameters()).element_size()
        return (2 if self.kind == "lstm" else 1) * self.layers * self.width * size


class Recurrent(Mixer[RecurrentState]):
    """A mixer that is nothing but cells. Subclasses name their kind."""

    kind: ClassVar[str]
    exports_state = True

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        layers: int = 1,
        both: bool = False,
        begin: str = "zeros",
        dropout: float = 0.0,
    ):
        super().__init__()
        self.width, self.how = width, check_begin(begin)
        if both and begin != "zeros":
            raise UserError("a recurrence in both directions begins with zeros")
        self.cells = Cells(self.kind, width, width if hidden is None else hidden, layers, both, dropout)

    @property
    def out_width(self) -> int:
        return self.cells.width

    @property
    def streams(self) -> bool:  # type: ignore[override]
        return self.cells.directions == 1

    def start(self, context: Context, capacity: int) -> RecurrentState:
        return self.cells.begin(context, self.how)

    def step(self, x: Tensor, state: RecurrentState, context: Context) -> tuple[Tensor, RecurrentState]:
        if not self.streams and not context.from_start:
            raise UserError(f"a {self.kind} in both directions needs the whole sequence at once, so it does not step")
        return self.cells(x, state, context)

    def cost(self, length: int, past: int = 0) -> Cost:
        return Cost(self.cells.flops(length), self.cells.state() if self.streams else 0)

    def growth(self) -> Growth:
        return Growth("n·d²", "n", "n")


class MemoryKeys(NamedTuple):
    """The keys and values of the encoder's memory, computed once."""

    keys: Tensor  # (batch, 1, source, dim) after `score.key`
    values: Tensor  # (batch, source, memory)
    at: Tensor  # (batch, source) positions, -1 for padding

    @staticmethod
    def join(sources: Sequence[MemoryKeys]) -> MemoryKeys:
        keys, values, at = zip(*sources, strict=True)
        return MemoryKeys(pad_and_cat(keys), pad_and_cat(values), pad_and_cat(at, -1))


class MemoryAttention(nn.Module):
    """Attention of a recurrent decoder's states over the memory, in one head.

    dim:    channels of a query.
    memory: channels of the memory. For a score that needs equal widths, keys are projected to that of the queries.
    """

    def __init__(self, score: Score | str | dict, dim: int, memory: int):
        super().__init__()
        self.dim, self.memory = dim, memory
        self.score = part(Score, score, dim=dim, heads=1, width=dim, key_dim=memory)
        wanted = getattr(self.score, "key_dim", dim)
        self.bring = nn.Identity() if wanted == memory else nn.Linear(memory, wanted, bias=False)
        self.key_dim = self.score.cached or dim

    def source(self, context: Context, who: str) -> MemoryKeys:
        if context.memory is None:
            raise UserError(f"{who} needs an encoder, or a memory given with the batch")
        x, valid, *_ = context.memory
        if x.shape[-1] != self.memory:
            raise UserError(f"{who} was made for a memory of width {self.memory}, not {x.shape[-1]}")
        at = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return MemoryKeys(
            self.score.key(self.bring(x)[:, None]), x, at.clone() if valid is None else torch.where(valid, at, -1)
        )

    def weigh(self, q: Tensor, source: MemoryKeys) -> Tensor:
        """q (batch, n, dim) -> (batch, 1, n, source)"""
        scores = self.score(self.score.query(q[:, None]), source.keys, source.at)
        return masked_softmax(scores.masked_fill(source.at[:, None, None, :] < 0, float("-inf")))

    def read(self, weights: Tensor, source: MemoryKeys) -> Tensor:
        """(batch, 1, n, source) -> (batch, n, memory)"""
        return weights[:, 0] @ source.values

    def flops(self, queries: int, keys: int) -> int:
        looks = queries * keys
        return 2 * looks * (self.dim + self.memory) + self.score.flops(queries, 0, looks)

    def state(self, keys: int, size: int) -> int:
        """Bytes of a row's source, with numbers of `size` bytes."""
        return keys * ((self.key_dim + self.memory) * size + 8)


def last_states(context: Context) -> list[RecurrentState]:
    """Return the last states of the encoder's recurrent mixers."""
    finals = context.memory.final_states if context.memory is not None else ()
    return [last for last in finals if isinstance(last, RecurrentState)]


def keep_column(context: Context, column: int, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` (batch, ...) for the rows in which this column is real, `old` for the others."""
    if context.valid is None:
        return new
    return torch.where(context.valid[:, column].view(-1, *[1] * (new.dim() - 1)), new, old)


def watch_after(tap: Tap, run: Callable[[Tensor | None], tuple[Tensor, Any, Tensor]]) -> tuple[Tensor, Any]:
    """Run a step with a tap on its weights. `run(None)` returns output, state and weights (batch, 1, n, source). Since
    the weights are complete only after the step, it is run again if a watcher replaces them."""
    y, state, weights = run(None)
    if tap.watched:
        given = tap(weights)
        if given is not weights:
            y, state, _ = run(given)
    return y, state


def check_begin(begin: str) -> str:
    if begin not in BEGIN_STATES:
        raise UserError(f"begin must be 'zeros' or 'memory', not '{begin}'")
    return begin
