"""Next-token prediction with teacher forcing: at every position the model predicts the next target token.

    loss = - sum over t of log p(y_t | y_<t, source)

Label smoothing: Szegedy et al. 2016, arXiv:1512.00567.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Head, Model, Norm
from regard.data.batches import IGNORE, Batch
from regard.ops.accumulate import multiplied_by
from regard.ops.cross_entropy import cross_entropy

from .objective import Loss


class NextToken:
    """smoothing: label smoothing."""

    splits = True  # a batch may be split

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        memory = None if batch.source is None else model.encode(batch.source, batch.source_valid)
        context = Context.begin(*batch.tokens.shape, batch.tokens.device, valid=batch.valid, memory=memory)
        x = model.hidden(batch.tokens, context)
        return Loss(*token_loss(model, x, context, batch.targets, self.smoothing), batch.count)


def token_loss(
    model: Model, x: Tensor, context: Context, targets: Tensor, smoothing: float, weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the target tokens, and the same without smoothing, both times the weight. x (batch,
    time, width) are the hidden states before the head."""
    with multiplied_by(weight):
        loss, nll = _token_loss(model, x, context, targets, smoothing)
    return (loss, nll) if weight == 1 else (weight * loss, weight * nll)


def _token_loss(model: Model, x: Tensor, context: Context, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    x, context, targets = _select_targets(model.head, x, context, targets)
    linear = model.head.linear(x, context)
    if linear is None:
        logs = None if smoothing else model.head.target_logprobs(x, context, targets)
        if logs is not None:
            return -logs.sum(), -logs.sum().detach()
        return _loss_of_logits(model.head(x, context), targets, smoothing)
    vectors, table, bias = linear
    with torch.autocast(x.device.type, enabled=False):  # log-probabilities need the precision of the table
        return cross_entropy(vectors.to(table.dtype), table, bias, targets, smoothing, IGNORE)


def _select_targets(head: Head, x: Tensor, context: Context, targets: Tensor) -> tuple[Tensor, Context, Tensor]:
    """Return only the positions with a target, in one row, where the head treats each position by itself."""
    has_target = targets != IGNORE
    mixes = head.pools or not head.streams or any(isinstance(m, Norm) and [*m.buffers()] for m in head.modules())
    if mixes or x.device.type != "cpu" or bool(has_target.all()):  # synchronizing with another device would cost more
        return x, context, targets
    x, targets = x[has_target][None], targets[has_target][None]
    return x, Context.begin(*targets.shape, x.device), targets


def _loss_of_logits(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the same two losses from logits (batch, time, vocab)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    loss, nll = (
        F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, label_smoothing=share, reduction="sum")
        for share in (smoothing, 0.0)
    )
    return loss, nll.detach()
