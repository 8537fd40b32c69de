"""Regression: the squared error of the number predicted for each text, or pair of texts.

loss = sum over texts of (y - number)^2
"""

from __future__ import annotations

from regard.core import Model
from regard.data.batches import Batch

from .objective import Loss


class Rate:
    """The squared error is also reported as -log p."""

    def __call__(self, model: Model, batch: Batch) -> Loss:
        predicted = model(batch.tokens, batch.valid, segments=batch.segments).float()[:, 0]  # (batch,)
        squares = (predicted - batch.targets).square().sum()
        return Loss(squares, squares.detach(), batch.count)
