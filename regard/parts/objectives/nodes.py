"""Node classification: the model sees the whole graph and predicts the classes of some of its nodes.

    loss = - sum over the labeled nodes of log p(class | all features, all edges)

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
    """smoothing: label smoothing."""

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        logits, targets = labeled_nodes(model, batch)
        loss, nll = (
            F.cross_entropy(logits, targets, label_smoothing=share, reduction="sum") for share in (self.smoothing, 0.0)
        )
        return Loss(loss, nll.detach(), batch.count)


def labeled_nodes(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the logits (nodes, classes), in float32 or better, and the classes (nodes,) of the labeled nodes."""
    logits = model(batch.tokens, valid=batch.valid, pattern=batch.pattern)
    labeled = batch.targets != IGNORE
    logits = logits[labeled]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)), batch.targets[labeled]


@torch.no_grad()
def node_metrics(model: Model, batch: Batch) -> dict[str, float]:
    """Return the loss per node, and the accuracy in percent."""
    logits, targets = labeled_nodes(model, batch)
    right = (logits.argmax(-1) == targets).double().mean()
    return {"loss": float(F.cross_entropy(logits, targets)), "accuracy": 100 * float(right)}
