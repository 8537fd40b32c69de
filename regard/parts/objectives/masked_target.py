"""Some target tokens are blank and are predicted from the others: what mask-predict needs.

    n of T tokens are blank, n drawn uniformly from 1 to T
    loss = - 2 sum over the blank t of log p(y_t | the others)          about half of all tokens are blank

Ghazvininejad et al. 2019, "Mask-Predict", arXiv:1904.09324.
"""

from __future__ import annotations

import torch

from regard.core import BLANK, Memory, Model
from regard.data.batches import IGNORE, Batch

from .objective import Loss
from .parallel import Parallel, generator_for, hidden, random_scores, target_lengths


class MaskedTarget(Parallel):
    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        generator, real = generator_for(batch, model.training), batch.targets != IGNORE
        lengths = target_lengths(batch)
        share = torch.rand(len(lengths), device=lengths.device, generator=generator)
        count = (share * lengths).long().minimum(lengths - 1) + 1
        order = random_scores(batch.targets, generator).masked_fill(~real, 2.0).argsort(1).argsort(1)
        blank = (order < count[:, None]) & real
        tokens = torch.where(blank | ~real, BLANK, batch.targets)
        x, context = hidden(model, tokens, batch.valid, memory)
        targets = batch.targets.masked_fill(~blank, IGNORE)
        return self.token_loss(model, x, context, targets, batch.count, weight=2.0)
