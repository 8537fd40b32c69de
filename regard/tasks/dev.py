"""Evaluate a model on the dev set during training: its loss, and metrics of its own answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.core import Model
from regard.data.batches import IGNORE, Batch, pad_rows
from regard.decode import DecodeConfig
from regard.metrics import measure
from regard.parts.objectives.objective import Objective

from .reader import Reader
from .run import Run

LOSS_METRICS = ("loss", "perplexity")  # measured without decoding


class Dev:
    """Maps a model to its metrics.

    objective:      computes the loss.
    batches:        returns a new iterator over the dev batches.
    make_predictor: wraps a model so that it can answer `sources`.
    loss_metrics:   the metrics that are computed from the loss.
    metrics:        the metrics of the answers, compared with `references`.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Callable[[], Iterator[Batch]],
        make_predictor: Callable[[Model, None, bool], Run | Reader],
        loss_metrics: Sequence[str] = LOSS_METRICS,
        metrics: Sequence[str] = (),
        sources: Sequence[str] = (),
        references: Sequence[Sequence[str]] = (),
    ):
        self.objective, self.batches, self.make_predictor = objective, batches, make_predictor
        self.loss_metrics, self.metrics, self.sources, self.references = loss_metrics, metrics, sources, references

    def __call__(self, model: Model) -> dict[str, float]:
        loss = self.loss(model)
        found = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        found = {name: found[name] for name in self.loss_metrics}
        if self.metrics:
            answers = [
                best[0].text
                for best in self.make_predictor(model, None, True).predict(self.sources, DecodeConfig(truncate=True))
            ]
            found |= {score.name: score.value for score in measure(self.metrics, answers, self.references)}
        return found

    def loss(self, model: Model) -> float:
        """Return the mean of -log p per target."""
        device = next(model.parameters()).device
        sums: list[Tensor] = []
        count = 0
        for batch in self.batches():
            sums.append(self.objective(model, batch.to(device)).nll)
            count += batch.count
        return float(torch.stack(sums).double().sum()) / count


def windows(text: np.ndarray, before: int, context: int, rows: int, pad: int, overlap: int = 0) -> Iterator[Batch]:
    """Yield all of a text (time,) in windows, the last of which may be shorter; every token is a target exactly once.

    before:  the token that precedes the first.
    overlap: the number of tokens that a window shares with the previous one; they are context, not targets.
    """
    starts = range(0, max(len(text) - overlap, 1), context - overlap)
    for first in range(0, len(starts), rows):
        ends = [(at, min(at + context, len(text))) for at in starts[first : first + rows]]
        targets, valid = pad_rows([text[at:end] for at, end in ends], IGNORE)
        read = [np.append(text[at - 1] if at else before, text[at : end - 1]) for at, end in ends]
        tokens, _ = pad_rows(read, pad)
        known = [0 if at == 0 else overlap for at, _ in ends]
        targets[torch.arange(targets.shape[1]) < torch.tensor(known)[:, None]] = IGNORE
        asked = int((targets != IGNORE).sum())
        yield Batch(tokens, targets, None if bool(valid.all()) else valid, count=asked)


def group_references(
    lines: Iterable[tuple[str, ...]], any_reference: bool, most: int = 0
) -> tuple[list[str], list[list[str]]]:
    """Return sources, and for each the targets that count as right: that of its line, or those of all its lines. most:
    the number of sources, spread evenly over the lines, which may be sorted; 0: all."""
    targets: dict[str | int, list[str]] = {}
    sources: dict[str | int, str] = {}
    for number, (*texts, target) in enumerate(lines):
        source: Any = texts[0] if len(texts) == 1 else tuple(texts)
        key = source if any_reference else number
        sources[key] = source
        targets.setdefault(key, []).append(target)
    count = len(sources)
    chosen = range(count) if not most or most >= count else [i * count // most for i in range(most)]
    left, right = list(sources.values()), list(targets.values())
    return [left[i] for i in chosen], [right[i] for i in chosen]
