"""A trained model that tells what is between two texts: a label (one follows from the other), or how alike they are.

regard.load("runs/x").predict([("a man sleeps", "somebody is awake")])[0][0].text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch

from regard.core import UserError
from regard.data.batches import FIRST_LABEL, Batches, pad_rows
from regard.data.matched import MatchCoder, Matched, labels_in, numbers_in, types_of
from regard.decode import DecodeConfig
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective
from regard.parts.objectives.rate import Rate
from regard.run import LONGEST, Prediction

from .reader import Reader, ranked, too_long


class Pair(list[int]):
    """The tokens of two texts, and of each which one it is of."""

    def __init__(self, ids: list[int], segments: list[int]):
        super().__init__(ids)
        self.segments = segments


class Matcher(Reader):
    """target: the tokenizer of the labels; where answers are numbers, nobody asks it. A text to answer is two of them,
    as a tuple or with a tab between."""

    reads = "matches"

    @property
    def rates(self) -> bool:
        """Answers are numbers."""
        return getattr(self.model.head, "classes", None) is None

    @property
    def metrics(self) -> Sequence[str]:  # type: ignore[override]
        return ("loss", "pearson", "spearman") if self.rates else ("loss", "accuracy", "f1")

    @cached_property
    def coder(self) -> MatchCoder:
        return MatchCoder(self.source, None if self.rates else self.target, types_of(self.model))

    def objective(self) -> Objective:
        return Rate() if self.rates else Classify()

    def labels(self, row: Sequence[str]) -> list[str]:
        return [] if self.rates else [row[-1].strip()]

    def coded(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        return [tuple(map(np.array, row)) for row in zip(*self.coder(rows), strict=True)]

    def batches(self, data: Sequence, budget: int) -> Batches:
        read = numbers_in if self.rates else labels_in
        return Matched(data, budget, 0, read, self.source.pad, shuffle=False)  # type: ignore

    def code(self, texts: list[str], config: DecodeConfig, begun: int = 0) -> tuple[list[list[int]], list[bool]]:
        limit = min(config.max_source_tokens or LONGEST, self.limit or LONGEST)
        pairs = [_two(text, number) for number, text in enumerate(texts, begun + 1)]
        rows = self.coder.frame(pairs)
        cut = too_long([len(ids) for ids, _ in rows], limit, config, begun)
        rows = self.coder.frame(pairs, limit) if any(cut) else rows
        return [Pair(*row) for row in rows], cut

    @torch.no_grad()
    def respond(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """The `config.num_return` most probable labels of each pair, or its number."""
        segments, _ = pad_rows([row.segments for row in rows], 0)  # type: ignore
        scores = self.model(*self.padded(rows), segments=segments.to(self.device))
        if self.rates:
            for value in scores[:, 0].tolist():
                yield [Prediction(f"{value:.4f}", value, 0.0, [], True)]
            return
        for found in ranked(scores, config.num_return):
            names = self.target.tokens(label + FIRST_LABEL for label, _ in found)
            yield [Prediction(name, log, log, [name], True) for name, (_, log) in zip(names, found, strict=True)]


def _two(text: str | Sequence[str], number: int) -> tuple[str, str]:
    sides = text.split("\t") if isinstance(text, str) else list(text)
    if len(sides) != 2:
        raise UserError(f"line {number} should be two texts with a tab between, and has {len(sides)}")
    return sides[0], sides[1]
