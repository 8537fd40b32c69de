"""The target is what is left of a longer canvas when repeats are joined and blanks go; the sum over all alignments is
learned. The padding token is the blank, and there is no end token.

Libovicky and Helcl 2018, arXiv:1811.04719; Saharia et al. 2020, arXiv:2004.07437.
"""

from __future__ import annotations

import torch

from regard.core import BLANK, Memory, Model
from regard.data.batches import IGNORE, Batch
from regard.ops import ctc

from .objective import Loss
from .parallel import Parallel, check_canvas, hidden, logits_of, mask, positions, target_lengths


class Ctc(Parallel):
    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        assert model.length is not None
        canvas, lengths = model.length.candidates(memory, 1).lengths[:, 0], target_lengths(batch) - 1
        targets = batch.targets.masked_fill(batch.targets == IGNORE, self.special.pad)
        real = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
        check_canvas(ctc.needed(targets, real), canvas, "its canvas")
        valid = positions(canvas)
        x, context = hidden(model, torch.full_like(valid, BLANK, dtype=torch.long), mask(valid), memory)
        logs = logits_of(model, x, context).log_softmax(-1)
        loss = ctc.ctc_loss(logs, targets, canvas, lengths, self.special.pad).sum()
        return Loss(loss, loss.detach(), batch.count)
