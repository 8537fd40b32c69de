"""Classification: cross-entropy over the labels of each text.

loss = - sum over texts of log p(label | text)
"""

from __future__ import annotations

import torch.nn.functional as F

from regard.core import Model
from regard.data.batches import Batch

from .objective import Loss


class Classify:
    """smoothing: label smoothing."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        logits = model(batch.tokens, batch.valid, segments=batch.segments).float()  # (batch, classes)
        nll = F.cross_entropy(logits, batch.targets, reduction="sum")
        if not self.smoothing:
            return Loss(nll, nll.detach(), batch.count)
        loss = F.cross_entropy(logits, batch.targets, label_smoothing=self.smoothing, reduction="sum")
        return Loss(loss, nll.detach(), batch.count)
