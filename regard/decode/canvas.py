"""Decoding with a model that writes all tokens at once: canvases are made, filled by a strategy, and ranked.

A strategy is a file in this folder with a function of its own name: it takes a model and blank canvases, and yields
the canvases of every iteration, the last of which holds the answers. Every row stands for itself: its answer is the
same alone, in any batch and with any padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor

from regard.core import BLANK, Canvases, Context, Memory, Model, UserError, select, source_lengths
from regard.errors import nearest
from regard.schema import name_of

from .config import STRATEGIES, DecodeConfig
from .result import Hypothesis, at_least_float32, check_not_nan

ANY_HEAD = ("parallel", "mask_predict", "ctc")  # strategies that any head can do
BY_HEAD = {"crf": "viterbi", "dag": "lookahead", "edits": "edit"}  # the strategy of a head that needs one


class Canvas(NamedTuple):
    """Rows of tokens, some of them BLANK."""

    tokens: Tensor  # (rows, n)
    valid: Tensor  # (rows, n) True...True False...False
    logprobs: Tensor  # (rows,) of the tokens that were written
    memory: Memory  # of the rows

    @property
    def lengths(self) -> Tensor:
        return self.valid.sum(1)


class Marks(NamedTuple):
    """The special tokens."""

    pad: int
    start: int
    end: int


Strategy = Callable[[Model, Canvas, Marks, DecodeConfig], Iterator[Canvas]]


def strategy_for(model: Model, config: DecodeConfig) -> str:
    """Return the name of the strategy: the config's, or the one that the model's head needs, or parallel."""
    head = name_of(model.head)
    name = config.strategy or BY_HEAD.get(head, "parallel")
    if name not in STRATEGIES:
        raise UserError(f"unknown strategy '{name}'{nearest(name, STRATEGIES)}")
    needed = {"viterbi": "crf", "lookahead": "dag", "edit": "edits"}.get(name)
    if needed is not None and head != needed:
        raise UserError(f"the strategy '{name}' needs the head '{needed}', and this model has '{head}'")
    return name


def strategies_of(model: Model) -> list[str]:
    """Return the names of all strategies that a model can be decoded with, the one that its head needs first."""
    needed = BY_HEAD.get(name_of(model.head))
    free = () if needed == "edit" else ANY_HEAD  # its canvas is empty at first
    return [*([needed] if needed else []), *free]


def best_canvases(model: Model, memory: Memory, count: int) -> Canvases:
    """Return the most probable canvases of every row, none of them longer than any answer may be."""
    assert model.length is not None
    found = model.length.candidates(memory, count)
    most = model.length.most(source_lengths(memory))[:, None]
    return found._replace(lengths=torch.minimum(found.lengths, most))


def blank_canvases(model: Model, memory: Memory, config: DecodeConfig) -> tuple[Canvas, Tensor]:
    """Return blank canvases, `length_beam` or fewer in turn for each row of the memory, and the log-probabilities
    (rows, candidates) of their lengths."""
    found = best_canvases(model, memory, config.length_beam)
    check_not_nan(found.logprobs)
    if config.max_new_tokens:
        found = found._replace(lengths=found.lengths.clamp(max=config.max_new_tokens))
    batch, count = found.lengths.shape
    memory = select(memory, torch.arange(batch, device=memory.x.device).repeat_interleave(count))
    if found.copies is not None:
        memory = memory._replace(copies=found.copies.flatten(0, 1))
    lengths = found.lengths.flatten()
    valid = torch.arange(max(int(lengths.max()), 1), device=lengths.device) < lengths[:, None]
    tokens = torch.full_like(valid, BLANK, dtype=torch.long)
    return Canvas(tokens, valid, torch.zeros(len(lengths), device=lengths.device), memory), found.logprobs


@torch.no_grad()
def canvases(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    """Yield the canvas after every iteration of the strategy."""
    name = strategy_for(model, config)
    strategy: Strategy = getattr(import_module(f"{__package__}.{name}"), name)
    yield from strategy(model, canvas, marks, config)


@torch.no_grad()
def write(model: Model, memory: Memory, marks: Marks, config: DecodeConfig) -> list[list[Hypothesis]]:
    """Return the answers for every row of the memory, best first: one for each candidate length."""
    canvas, likely = blank_canvases(model, memory, config)
    count = len(canvas.tokens) // len(memory.x)
    *_, last = canvases(model, canvas, marks, config)
    check_not_nan(last.logprobs)
    found, ends_itself = [], strategy_for(model, config) == "ctc"  # which has no end token
    for tokens, length, logprob in zip(*(t.tolist() for t in (last.tokens, last.lengths, last.logprobs)), strict=True):
        tokens = tokens[:length]
        at = tokens.index(marks.end) if marks.end in tokens else length
        answer = [token for token in tokens[:at] if token not in (*marks, BLANK)]
        found.append(Hypothesis(answer, logprob / max(length, 1), logprob, at < length or ends_itself))
    possible = (likely > -torch.inf).tolist()  # a row may have fewer candidates than others
    rows = [list(compress(found[at * count :], kept)) for at, kept in enumerate(possible)]
    return [sorted(row, key=lambda one: -one.score) for row in rows]


def log_probs(model: Model, canvas: Canvas) -> Tensor:
    """Return the log-probabilities (rows, n, vocab) of tokens at every position."""
    x, context = hidden(model, canvas)
    return at_least_float32(model.head(x, context)).log_softmax(-1)


def hidden(model: Model, canvas: Canvas) -> tuple[Tensor, Context]:
    """Return the hidden vectors (rows, n, width) of a canvas, and its context."""
    valid = None if bool(canvas.valid.all()) else canvas.valid
    tokens = torch.where(canvas.valid, canvas.tokens, BLANK)
    context = Context.begin(*tokens.shape, tokens.device, valid=valid, memory=canvas.memory)
    return model.hidden(tokens, context), context
