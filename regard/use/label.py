"""A trained model that labels texts: sentiment, topic, intent.

regard.load("runs/x").predict(["what a film"])[0][0].text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from regard.data.batches import FIRST_LABEL, Batches, Labelled
from regard.decode import DecodeConfig
from regard.parts.objectives.classify import Classify
from regard.parts.objectives.objective import Objective
from regard.run import Prediction

from .reader import Reader, ranked


class Labeller(Reader):
    """target: the tokenizer of the labels."""

    metrics = ("loss", "accuracy", "f1")

    def objective(self) -> Objective:
        return Classify()

    def labels(self, row: Sequence[str]) -> list[str]:
        return [row[-1].strip()]

    def coded(self, rows: Sequence[tuple[str, ...]]) -> list[tuple[np.ndarray, ...]]:
        texts, labels = zip(*rows, strict=True)
        numbers = [np.array([number + FIRST_LABEL]) for number in self.target.numbers(labels)]
        return list(zip(map(np.array, self.source.frame(texts)), numbers, strict=True))

    def batches(self, data: Sequence, budget: int) -> Batches:
        return Labelled(data, budget, 0, self.source.pad, shuffle=False)  # type: ignore[arg-type]

    @torch.no_grad()
    def respond(self, rows: list[list[int]], config: DecodeConfig) -> Iterator[list[Prediction]]:
        """The `config.num_return` most probable labels of each text."""
        for found in ranked(self.model(*self.padded(rows)), config.num_return):
            names = self.target.tokens(label + FIRST_LABEL for label, _ in found)
            yield [Prediction(name, log, log, [name], True) for name, (_, log) in zip(names, found, strict=True)]
