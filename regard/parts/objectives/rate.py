"""The right number of every text, or pair of texts, by the square of what is missing.

loss = sum over texts of (y - number)^2
"""

from __future__ import annotations

from regard.core import Model
from regard.data.batches import Batch

from .objective import Loss


class Rate:
    """What is told as -log p is the same square."""

    def __call__(self, model: Model, batch: Batch) -> Loss:
        found = model(batch.tokens, batch.valid, segments=batch.segments).float()[:, 0]  # (batch,)
        squares = (found - batch.targets).square().sum()
        return Loss(squares, squares.detach(), batch.count)
