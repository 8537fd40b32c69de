"""Batch sequences of similar length up to a budget of tokens, in an order that the seed and the epoch decide.

The position of a run in its data is two numbers, epoch and index, so that it can resume in the middle of an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.core import Pattern, UserError

IGNORE = -100
Fertilities = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of a source and a target
FIRST_LABEL = 4  # in a tokenizer of labels, the ids of labels follow those of the special tokens


class Batch(NamedTuple):
    """The inputs of a model and its targets."""

    tokens: Tensor  # (batch, time) decoder inputs
    targets: Tensor  # (batch, time) the next token, IGNORE where there is no loss
    valid: Tensor | None = None  # (batch, time)
    source: Tensor | None = None  # (batch, source)
    source_valid: Tensor | None = None
    count: int = 0  # targets that are not IGNORE
    pattern: Pattern | None = None  # the attention pattern, where the data gives it, as a graph does
    segments: Tensor | None = None  # (batch, time) the text of a pair that each token belongs to: 0 or 1
    next_sentence_labels: Tensor | None = None  # (batch,) 0: the second text follows the first; 1: it does not
    stream_offset: int | None = None  # of a batch from streams: the offset of its first column in them
    copies: Tensor | None = None  # (batch, source) fertilities: the target tokens that each source token becomes
    progress: float = 0.0  # the share of the training that is done, for objectives that change with it

    @property
    def positions(self) -> int:
        """Return the number of positions that a model computes, padding and source included."""
        given = [self.tokens] if self.source is None else [self.tokens, self.source]
        return sum(tensor.shape[0] * tensor.shape[1] for tensor in given)

    @property
    def input_tokens(self) -> int:
        """Return the number of input tokens, source included and padding not. Frames, nodes and images count as one
        token each."""
        read = _count_real(self.tokens, self.valid)
        return read if self.source is None else read + _count_real(self.source, self.source_valid)

    def split(self, max_positions: int, multiple: int = 1) -> list[Batch]:
        """Split the rows into batches of about `max_positions` positions, each padded only as far as it needs. Their
        number is a multiple of `multiple` where there are enough rows."""
        count = min(max(round(self.positions / (max_positions * multiple)), 1) * multiple, len(self.tokens))
        if count < 2 or any(one is not None for one in (self.pattern, self.stream_offset, self.next_sentence_labels)):
            return [self]
        edges = [len(self.tokens) * i // count for i in range(count + 1)]
        return [self._rows(slice(begin, end)) for begin, end in pairwise(edges)]

    def _rows(self, rows: slice) -> Batch:
        def cut(tensor: Tensor | None, valid: Tensor | None) -> Tensor | None:
            width = None if valid is None else int(valid[rows].sum(1).max())
            return None if tensor is None else tensor[rows] if width is None else tensor[rows, :width]

        tokens, targets = cut(self.tokens, self.valid), cut(self.targets, self.valid)
        assert tokens is not None
        assert targets is not None
        return self._replace(
            tokens=tokens,
            targets=targets,
            valid=cut(self.valid, self.valid),
            source=cut(self.source, self.source_valid),
            source_valid=cut(self.source_valid, self.source_valid),
            count=int((targets != IGNORE).sum()),
            segments=cut(self.segments, self.valid),
            copies=cut(self.copies, self.source_valid),
        )

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(t.to(device, non_blocking=True) if isinstance(t, Tensor) else t for t in self))


def _count_real(given: Tensor, valid: Tensor | None) -> int:
    if valid is not None:
        return int(valid.sum())
    return len(given) * (given.shape[1] if given.ndim < 4 else 1)  # four dimensions: images


class SequenceDataset(Protocol):
    """A dataset whose examples are tuples of token arrays: (source, target) or (text,)."""

    lengths: np.ndarray  # (examples, columns)

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]: ...


def plan_batches(lengths: np.ndarray, budget: int, rng: np.random.Generator, rows: int = 0) -> list[np.ndarray]:
    """Return the example indices of each batch: sorted by length, ties in random order, then the batches shuffled.

    budget: the most tokens of a batch, padding included.
    rows:   the most examples of a batch; 0: as many as fit the budget.
    """
    longest = lengths.max(1)
    order = np.lexsort((rng.random(len(longest), dtype=np.float32), *lengths.T, longest))
    sizes = longest[order].astype(np.int64)
    batches, begin = [], 0
    while begin < len(order):
        most = max(budget // max(int(sizes[begin]), 1), 1)
        low, high = begin + 1, min(begin + (min(most, rows) if rows else most), len(order))
        while low < high:  # the last end at which rows times the longest row still fits
            middle = (low + high + 1) // 2
            if (middle - begin) * sizes[middle - 1] <= budget:
                low = middle
            else:
                high = middle - 1
        batches.append(order[begin:low])
        begin = low
    rng.shuffle(batches)  # type: ignore[arg-type]
    return batches


class BucketedBatches:
    """Batches of pairs or single sequences of similar length.

    rows:        the most examples of a batch; 0: no limit.
    fertilities: returns how many target tokens each source token of a pair becomes, where a model learns that.
    """

    def __init__(
        self,
        data: SequenceDataset,
        budget: int,
        seed: int,
        start: int,
        pad: int = 0,
        shuffle: bool = True,
        rows: int = 0,
        fertilities: Fertilities | None = None,
    ):
        if len(data.lengths) == 0:
            raise UserError("there is no example to make a batch of")
        self.data, self.budget, self.seed, self.start, self.pad, self.shuffle = data, budget, seed, start, pad, shuffle
        self.rows, self.fertilities = rows, fertilities

    def epoch(self, number: int) -> list[np.ndarray]:
        batches = plan_batches(self.data.lengths, self.budget, np.random.default_rng((self.seed, number)), self.rows)
        return batches if self.shuffle else sorted(batches, key=lambda batch: int(batch[0]))

    def make(self, numbers: np.ndarray) -> Batch:
        rows = [self.data[int(number)] for number in numbers]
        batch = teacher_forced(rows, self.start, self.pad)
        if self.fertilities is None:
            return batch
        return batch._replace(copies=pad_rows([self.fertilities(row[0], row[1]) for row in rows], 0)[0])


def teacher_forced(rows: list[tuple[np.ndarray, ...]], start: int, pad: int) -> Batch:
    """Return pairs or single sequences as a batch for teacher forcing. Targets end in the end token already; `start` is
    put before them."""
    target, valid = pad_rows([row[-1] for row in rows], pad)
    tokens = torch.cat((torch.full_like(target[:, :1], start), target[:, :-1]), 1)
    targets = torch.where(valid, target, IGNORE)
    source = source_valid = None
    if len(rows[0]) > 1:
        source, source_valid = pad_rows([row[0] for row in rows], pad)
        source_valid = None if bool(source_valid.all()) else source_valid
    return Batch(tokens, targets, None if bool(valid.all()) else valid, source, source_valid, int(valid.sum()))


class LabeledBatches:
    """Batches of texts with one label each: `targets` is (batch,). A record is (text, label followed by the end
    token)."""

    def __init__(
        self, data: SequenceDataset, budget: int, seed: int, pad: int = 0, shuffle: bool = True, rows: int = 0
    ):
        self.inner = BucketedBatches(data, budget, seed, 0, pad, shuffle, rows)

    def epoch(self, number: int) -> list[np.ndarray]:
        return self.inner.epoch(number)

    def make(self, numbers: np.ndarray) -> Batch:
        rows = [self.inner.data[int(number)] for number in numbers]
        tokens, valid = pad_rows([row[0] for row in rows], self.inner.pad)
        targets = torch.tensor([int(row[1][0]) - FIRST_LABEL for row in rows])
        return Batch(tokens, targets, None if bool(valid.all()) else valid, count=len(rows))


class WindowBatches:
    """Batches of `rows` windows of one long text, which every epoch cuts at a new offset."""

    def __init__(self, stream: np.ndarray, context: int, rows: int, seed: int, shuffle: bool = True):
        if len(stream) < context + 1:
            raise UserError(f"a text of {len(stream)} tokens is too short for a context of {context}")
        self.stream, self.context, self.rows, self.seed, self.shuffle = stream, context, rows, seed, shuffle

    def epoch(self, number: int) -> list[np.ndarray]:
        rng = np.random.default_rng((self.seed, number))
        slack = min(self.context, len(self.stream) - self.context - 1)
        offset = int(rng.integers(slack)) if self.shuffle and slack > 0 else 0
        starts = np.arange(offset, len(self.stream) - self.context, self.context)
        if self.shuffle:
            rng.shuffle(starts)
        return [starts[i : i + self.rows] for i in range(0, len(starts), self.rows)]

    def make(self, numbers: np.ndarray) -> Batch:
        text = torch.from_numpy(np.stack([self.stream[n : n + self.context + 1] for n in numbers]).astype(np.int64))
        return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), count=text[:, 1:].numel())


def pad_rows(rows: Sequence[np.ndarray] | Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return the rows padded to the longest, (batch, time), and which positions are real, (batch, time)."""
    lengths = torch.tensor([len(row) for row in rows])
    width = max(int(lengths.max()), 1)
    block = np.full((len(rows), width), pad, dtype=np.int64)
    for i, row in enumerate(rows):
        block[i, : len(row)] = row
    return torch.from_numpy(block), torch.arange(width)[None] < lengths[:, None]


Batches = BucketedBatches | WindowBatches | LabeledBatches


class ResumableBatches:
    """An endless iterator over batches that can begin anywhere: `epoch` and `index` say which batch comes next."""

    def __init__(self, batches: Batches, epoch: int = 0, index: int = 0):
        self.batches, self.epoch, self.index = batches, epoch, index
        self._plan: list[np.ndarray] | None = None

    @property
    def size(self) -> int:
        """Return the number of batches in this epoch."""
        self._plan = self.batches.epoch(self.epoch) if self._plan is None else self._plan
        return len(self._plan)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self.index >= self.size:
            self.epoch, self.index, self._plan = self.epoch + 1, 0, None
            _ = self.size
        assert self._plan is not None
        batch = self.batches.make(self._plan[self.index])
        self.index += 1
        return batch


def first_epoch(batches: Batches) -> Iterator[Batch]:
    """Yield every batch of epoch 0, for evaluation."""
    for numbers in batches.epoch(0):
        yield batches.make(numbers)
