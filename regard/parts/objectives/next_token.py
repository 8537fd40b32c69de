"""Teacher forcing: at every position the model is asked for the next token of the right answer.

    loss = - sum over t of log p(y_t | y_<t, source)

Label smoothing: Szegedy et al. 2016, arXiv:1512.00567.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import Context, Head, Model, Norm
from regard.data.batches import IGNORE, Batch
from regard.ops.cross_entropy import cross_entropy

from .objective import Loss


class NextToken:
    """smoothing: of the labels."""

    splits = True  # a batch may come in parts

    def __init__(self, smoothing: float = 0.0):
        self.smoothing = smoothing

    def __call__(self, model: Model, batch: Batch) -> Loss:
        memory = None if batch.source is None else model.encode(batch.source, batch.source_valid)
        context = Context.begin(*batch.tokens.shape, batch.tokens.device, valid=batch.valid, memory=memory)
        x = model.hidden(batch.tokens, context)
        return Loss(*of_tokens(model, x, context, batch.targets, self.smoothing), batch.count)


def of_tokens(model: Model, x: Tensor, context: Context, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The summed loss of the tokens that are asked for, and the same without smoothing; x (batch, time, width) are the
    vectors before the head."""
    x, context, targets = _asked(model.head, x, context, targets)
    linear = model.head.linear(x, context)
    if linear is None:
        logs = None if smoothing else model.head.target_logprobs(x, context, targets)
        if logs is not None:
            return -logs.sum(), -logs.sum().detach()
        return _plain(model.head(x, context), targets, smoothing)
    vectors, table, bias = linear
    with torch.autocast(x.device.type, enabled=False):  # log p is made in full, whatever the layers were made in
        return cross_entropy(vectors.to(table.dtype), table, bias, targets, smoothing, IGNORE)


def _asked(head: Head, x: Tensor, context: Context, targets: Tensor) -> tuple[Tensor, Context, Tensor]:
    """What is asked for alone, in one row, where a head looks at each position by itself."""
    asked = targets != IGNORE
    together = head.pools or not head.streams or any(isinstance(m, Norm) and [*m.buffers()] for m in head.modules())
    if together or x.device.type != "cpu" or bool(asked.all()):  # to ask another device would cost more
        return x, context, targets
    x, targets = x[asked][None], targets[asked][None]
    return x, Context.begin(*targets.shape, x.device), targets


def _plain(scores: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The same for scores (batch, time, vocab) that are no product with a table."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).flatten(0, 1)
    loss, nll = (
        F.cross_entropy(scores, targets.flatten(), ignore_index=IGNORE, label_smoothing=share, reduction="sum")
        for share in (smoothing, 0.0)
    )
    return loss, nll.detach()
