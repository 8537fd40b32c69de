"""Fertilities: how many target tokens each source token becomes. Their sum is the length, and the canvas is made of
copies of the source vectors.

    p(fertility of s) = softmax(W memory_s)

In training the fertilities come from a word alignment. Gu et al. 2018, "Non-Autoregressive Neural Machine Translation",
arXiv:1711.02281.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bases.lengths import check_classifier
from regard.core import Canvases, Length, Memory, source_lengths


class Fertility(Length):
    """classes: fertilities from 0 to classes - 1.
    weight:     factor of the mean loss over the source tokens.
    """

    examples = ({"classes": 5},)

    def __init__(self, width: int, classes: int = 50, weight: float = 1.0):
        super().__init__()
        check_classifier(classes, weight)
        self.classes, self.weight = classes, weight
        self.out = nn.Linear(width, classes)

    def candidates(self, memory: Memory, count: int) -> Canvases:
        """Return the most probable fertilities, then those that differ from them in one token, the most probable
        first. A row of nothing but zeros gets one copy of its last token."""
        logs, columns = self.out(memory.x).log_softmax(-1), torch.arange(memory.x.shape[1], device=memory.x.device)
        if memory.valid is not None:  # padding has a fertility of 0, for sure
            none = torch.full_like(logs, -torch.inf).index_fill(-1, columns[:1], 0.0)
            logs = torch.where(memory.valid[..., None], logs, none)
        two = logs.topk(2, -1)
        copies, logprobs = two.indices[:, None, :, 0], two.values[..., 0].sum(1, keepdim=True)
        if count > 1:  # the stable sort is not in ONNX
            loss, changed = (two.values[..., 1] - two.values[..., 0]).sort(dim=1, descending=True, stable=True)
            count = min(count, len(columns) + 1)
            copies = copies.repeat(1, count, 1)
            second = two.indices[..., 1].gather(1, changed[:, : count - 1])
            copies[:, 1:].scatter_(2, changed[:, : count - 1, None], second[..., None])
            logprobs = logprobs + torch.cat((0 * loss[:, :1], loss[:, : count - 1]), 1)
        last = columns == source_lengths(memory)[:, None] - 1
        copies = torch.where((copies.sum(2) == 0)[..., None] & last[:, None], 1, copies)
        return Canvases(copies.sum(2), logprobs, copies)

    def loss(self, memory: Memory, lengths: Tensor, copies: Tensor | None) -> Tensor | None:
        if copies is None:
            return None
        logits, targets = self.out(memory.x), copies.clamp(max=self.classes - 1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        if memory.valid is None:
            return self.weight * losses.mean(1)
        return self.weight * losses.where(memory.valid, 0.0).sum(1) / memory.valid.sum(1)
