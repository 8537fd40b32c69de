"""A decoder that edits learns three things from each target: how many tokens are missing where, which tokens they are,
and which of its own tokens are wrong.

    1. drop random tokens of the target        learn the number that is missing between each two that are left
    2. blanks where they were                  learn the tokens
    3. its own tokens in their places          learn which to delete: those outside a longest common subsequence

The canvas stands between the start and the end token, which are never deleted. Gu et al. 2019, "Levenshtein
Transformer", arXiv:1905.11006.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.core import BLANK, Memory, Model
from regard.data.batches import IGNORE, Batch
from regard.decode.result import at_least_float32
from regard.ops.edits import kept

from .objective import Loss
from .parallel import Parallel, generator_for, hidden, logits_of, mask, random_scores

HALF = 2.0  # weight of what is learned of half of the tokens, on average


class Edits(Parallel):
    head = "edits"

    def target_loss(self, model: Model, batch: Batch, memory: Memory) -> Loss:
        starts = torch.full_like(batch.targets[:, :1], self.special.start)
        whole = torch.cat((starts, batch.targets), 1)  # start, target, end
        valid = whole != IGNORE
        inner = valid & (whole != self.special.end)
        inner[:, 0] = False
        generator = generator_for(batch, model.training)
        rate = torch.rand(len(whole), 1, device=whole.device, generator=generator)
        dropped = (random_scores(whole, generator) < rate) & inner
        blanks = torch.where(dropped, BLANK, whole.masked_fill(~valid, self.special.pad))
        x, context = hidden(model, blanks, mask(valid), memory)
        total = self.token_loss(model, x, context, whole.masked_fill(~dropped, IGNORE), batch.count, HALF)
        extra = self._insertion_loss(model, memory, whole, valid, dropped)
        if model.head.delete is not None:
            own = torch.where(dropped, logits_of(model, x.detach(), context).argmax(-1), whole)
            extra = extra + self._deletion_loss(model, memory, own, whole, valid, inner)
        return total._replace(loss=total.loss + extra)

    def _insertion_loss(self, model: Model, memory: Memory, whole: Tensor, valid: Tensor, dropped: Tensor) -> Tensor:
        """Return the summed loss of the numbers of missing tokens, as if of all tokens."""
        left = valid & ~dropped
        order = torch.argsort(~left, dim=1, stable=True)
        count = left.sum(1)
        real = torch.arange(int(count.max()), device=whole.device) < count[:, None]
        at = order[:, : real.shape[1]]
        tokens = whole.gather(1, at).masked_fill(~real, self.special.pad)
        x, _ = hidden(model, tokens, mask(real), memory)
        missing = (at[:, 1:] - at[:, :-1] - 1).clamp(min=0, max=model.head.most)  # type: ignore[type-var]
        logits = at_least_float32(model.head.insertions(x))  # type: ignore[operator]
        return HALF * F.cross_entropy(logits[real[:, 1:]], missing[real[:, 1:]], reduction="sum")

    def _deletion_loss(
        self, model: Model, memory: Memory, own: Tensor, whole: Tensor, valid: Tensor, inner: Tensor
    ) -> Tensor:
        """Return the summed loss of what to delete of its own canvas."""
        wrong = torch.zeros_like(own)
        every = zip(own.tolist(), whole.tolist(), valid.sum(1).tolist(), strict=True)
        for row, (mine, target, real) in enumerate(every):
            keep = kept(mine[1 : real - 1], target[1 : real - 1])
            wrong[row, 1 : real - 1] = 1 - torch.tensor(keep, dtype=torch.long, device=own.device)
        x, _ = hidden(model, own.masked_fill(~valid, self.special.pad), mask(valid), memory)
        logits = at_least_float32(model.head.delete(x))  # type: ignore[operator]
        return F.cross_entropy(logits[inner], wrong[inner], reduction="sum")
