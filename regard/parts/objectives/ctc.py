"""The target is what is left of a longer canvas when repeats are joined and blanks go; the sum over all alignments is
learned. The padding token is the blank, and there is no end token.

Libovicky and Helcl 2018, arXiv:1811.04719; Saharia et al. 2020, arXiv:2004.07437.
"""

from __future__ import annotations

import numpy as np
import torch

from regard.core import BLANK, Memory, Model
from regard.data.batches import IGNORE, Batch
from regard.ops import ctc

from .objective import Loss
from .parallel import Parallel, check_canvas, hidden, log_probs_of, mask, positions, target_lengths


class Ctc(Parallel):
    @staticmethod
    def needed(target: np.ndarray) -> int:
        return len(target) - 1 + int((target[1:] == target[:-1]).sum())

    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        assert model.length is not None
        canvas, lengths = model.length.candidates(memory, 1).lengths[:, 0], target_lengths(batch) - 1
        targets = batch.targets.masked_fill(batch.targets == IGNORE, self.special.pad)
        real = torch.arange(targets.shape[1], device=targets.device) < lengths[:, None]
        check_canvas(ctc.needed(targets, real), canvas, "its canvas")
        valid = positions(canvas)
        x, context = hidden(model, torch.full_like(valid, BLANK, dtype=torch.long), mask(valid), memory)
        blanks = torch.full_like(targets[:, :1], self.special.pad)
        logs = log_probs_of(model, x, context, torch.cat((blanks, targets), 1))
        loss = ctc.ctc_loss(logs[..., 0], logs[..., 1:], targets, canvas, lengths).sum()
        return Loss(loss, loss.detach(), batch.count)
