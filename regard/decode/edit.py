"""Insert and delete until nothing changes. It stops: after `iterations`, when a row is as it was before, or when it has
been so before, since from there on it would go in a circle.

Gu et al. 2019, "Levenshtein Transformer", arXiv:1905.11006.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.core import BLANK, Model, select, source_lengths
from regard.data.batches import pad_rows

from .canvas import Canvas, Marks, hidden
from .config import DecodeConfig
from .result import at_least_float32, check_not_nan


def edit(model: Model, canvas: Canvas, marks: Marks, config: DecodeConfig) -> Iterator[Canvas]:
    device, count = canvas.tokens.device, len(canvas.tokens)
    rows = [[marks.start, marks.end] for _ in range(count)]
    most = (2 * source_lengths(canvas.memory) + 20).tolist()
    if config.max_new_tokens:
        most = [config.max_new_tokens] * count
    logprobs, going = torch.zeros(count, device=device), list(range(count))
    before: list[set[tuple[int, ...]]] = [{tuple(row)} for row in rows]
    for _ in range(config.iterations):
        memory = select(canvas.memory, torch.tensor(going, device=device))
        some = _delete(model, memory, [rows[i] for i in going], marks)
        some = _insert(model, memory, some, [most[i] for i in going], marks)
        some, logs = _fill(model, memory, some, marks)
        logprobs[going] = logs.to(logprobs.dtype)
        still = []
        for i, row in zip(going, some, strict=True):
            rows[i] = row
            if tuple(row) not in before[i]:
                still.append(i)
                before[i].add(tuple(row))
        yield _canvas(canvas, rows, logprobs, marks)
        going = still
        if not going:
            return


def _canvas(like: Canvas, rows: list[list[int]], logprobs: Tensor, marks: Marks) -> Canvas:
    tokens, valid = pad_rows([row[1:] for row in rows], marks.pad)
    return like._replace(tokens=tokens.to(like.tokens.device), valid=valid.to(like.valid.device), logprobs=logprobs)


def _hidden(model: Model, memory, rows: list[list[int]], marks: Marks) -> tuple[Tensor, Canvas, object]:
    tokens, valid = pad_rows(rows, marks.pad)
    device = memory.x.device
    canvas = Canvas(tokens.to(device), valid.to(device), torch.zeros(len(rows), device=device), memory)
    x, context = hidden(model, canvas)
    return x, canvas, context


def _delete(model: Model, memory, rows: list[list[int]], marks: Marks) -> list[list[int]]:
    if model.head.delete is None or all(len(row) == 2 for row in rows):
        return rows
    x, _, _ = _hidden(model, memory, rows, marks)
    gone = model.head.delete(x).argmax(-1).tolist()  # type: ignore[operator]
    return [
        [row[0], *(token for token, out in zip(row[1:-1], away[1:], strict=False) if not out), row[-1]]
        for row, away in zip(rows, gone, strict=True)
    ]


def _insert(model: Model, memory, rows: list[list[int]], most: list[int], marks: Marks) -> list[list[int]]:
    x, _, _ = _hidden(model, memory, rows, marks)
    logits = model.head.insertions(x)  # type: ignore[operator]
    check_not_nan(logits)
    counts = logits.argmax(-1).tolist()
    longer = []
    for row, numbers, limit in zip(rows, counts, most, strict=True):
        room, new = max(limit - (len(row) - 1), 0), [row[0]]
        for token, number in zip(row[1:], numbers, strict=False):
            added = min(number, room)
            room -= added
            new += [BLANK] * added + [token]
        longer.append(new)
    return longer


def _fill(model: Model, memory, rows: list[list[int]], marks: Marks) -> tuple[list[list[int]], Tensor]:
    """Return the rows with tokens in place of blanks, and the log-probabilities (rows,) of all their tokens."""
    x, canvas, context = _hidden(model, memory, rows, marks)
    logits = at_least_float32(model.head(x, context))  # type: ignore[arg-type]
    forbidden = torch.tensor([marks.pad, marks.start, marks.end], device=logits.device)
    logs = logits.log_softmax(-1)
    tokens = logs.index_fill(-1, forbidden, -torch.inf).argmax(-1)
    blank = canvas.valid & (canvas.tokens == BLANK)
    said = logs.gather(2, torch.where(blank, tokens, canvas.tokens.clamp(min=0))[..., None])[..., 0]
    inner = canvas.valid.clone()
    inner[:, 0] = False
    inner[torch.arange(len(rows)), canvas.lengths - 1] = False
    filled = torch.where(blank, tokens, canvas.tokens).tolist()
    return [row[: len(old)] for row, old in zip(filled, rows, strict=True)], said.masked_fill(~inner, 0.0).sum(1)
