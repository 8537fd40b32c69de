"""The tokens of a canvas are learned together, as a sequence of a linear-chain CRF, and each by itself beside it.

    loss = - log p_crf(y) - weight sum over t of log p(y_t)

Sun et al. 2019, arXiv:1910.11555.
"""

from __future__ import annotations

from regard.core import Memory, Model
from regard.data.batches import IGNORE, Batch

from .next_token import token_loss
from .objective import Loss
from .parallel import Parallel, SpecialTokens, hidden


class Crf(Parallel):
    """weight: of the loss of the single tokens."""

    head = "crf"

    def __init__(self, special: SpecialTokens, smoothing: float = 0.0, weight: float = 0.5):
        super().__init__(special, smoothing)
        self.weight = weight

    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        tokens, valid, targets = self.canvas(model, batch, memory)
        x, context = hidden(model, tokens, valid, memory)
        loss, _ = token_loss(model, x, context, targets, self.smoothing, self.weight)
        real = targets.masked_fill(targets == IGNORE, self.special.end)
        together = -model.head.log_likelihood(x, context, real).sum()  # type: ignore[operator]
        return Loss(together + loss, together.detach(), batch.count)
