"""Glancing: the decoder is shown as many target tokens as it would get wrong, times a ratio, and learns the rest.

    1. predict all tokens from a blank canvas        2. show ratio x (number of wrong ones) random target tokens
    3. loss = - sum over the others of log p(y_t | what was shown)

The ratio falls from `ratio` to `last_ratio` during training. Qian et al. 2021, "Glancing Transformer for
Non-Autoregressive Neural Machine Translation", arXiv:2008.07905.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.core import Memory, Model, UserError
from regard.data.batches import IGNORE, Batch

from .objective import Loss
from .parallel import Parallel, SpecialTokens, hidden, logits_of, random_scores


class Glancing(Parallel):
    """ratio, last_ratio: of the tokens shown to the wrong ones, at the beginning and at the end of training."""

    def __init__(self, special: SpecialTokens, smoothing: float = 0.0, ratio: float = 0.5, last_ratio: float = 0.3):
        super().__init__(special, smoothing)
        if not 0 <= ratio <= 1 or not 0 <= last_ratio <= 1:
            raise UserError(f"objective.ratio and last_ratio must be from 0 to 1, not {ratio:g} and {last_ratio:g}")
        self.ratio, self.last_ratio = ratio, last_ratio

    def ratio_at(self, progress: float) -> float:
        return self.ratio + (self.last_ratio - self.ratio) * progress

    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        tokens, valid, targets = self.canvas(model, batch, memory)
        if model.training:
            with torch.no_grad():
                predicted = logits_of(model, *hidden(model, tokens, valid, memory)).argmax(-1)
            shown = self.shown(predicted, targets, self.ratio_at(batch.progress))
            tokens, targets = torch.where(shown, targets, tokens), targets.masked_fill(shown, IGNORE)
        x, context = hidden(model, tokens, valid, memory)
        return self.token_loss(model, x, context, targets, batch.count)

    def shown(self, predicted: Tensor, targets: Tensor, ratio: float) -> Tensor:
        """Return the random positions (batch, n) that are shown: `ratio` times the wrong ones of each row."""
        real = targets != IGNORE
        count = (((predicted != targets) & real).sum(1) * ratio).long()
        order = random_scores(targets, None).masked_fill(~real, 2.0).argsort(1).argsort(1)
        return order < count[:, None]
