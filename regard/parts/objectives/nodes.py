"""The classes of a graph's nodes: the whole graph is seen, and some of its nodes are asked for.

    loss = - sum over the nodes asked for of log p(class | all features, all edges)

Veličković et al. 2018, arXiv:1710.10903; the setting: Yang et al. 2016, arXiv:1603.08861.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Model
from regard.data.batches import IGNORE, Batch

from .objective import Loss


class Nodes:
    """smoothing: of the labels."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        scores, targets = asked(model, batch)
        loss, nll = (
            F.cross_entropy(scores, targets, label_smoothing=share, reduction="sum") for share in (self.smoothing, 0.0)
        )
        return Loss(loss, nll.detach(), batch.count)


def asked(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores (nodes asked for, classes) in float32 at least, and what is right (nodes asked for,)."""
    scores = model(batch.tokens, valid=batch.valid, pattern=batch.pattern)
    wanted = batch.targets != IGNORE
    scores = scores[wanted]
    return scores.to(torch.promote_types(scores.dtype, torch.float32)), batch.targets[wanted]


@torch.no_grad()
def measured(model: Model, batch: Batch) -> dict[str, float]:
    """Loss per node, and how many in a hundred get their class."""
    scores, targets = asked(model, batch)
    right = (scores.argmax(-1) == targets).double().mean()
    return {"loss": float(F.cross_entropy(scores, targets)), "accuracy": 100 * float(right)}
