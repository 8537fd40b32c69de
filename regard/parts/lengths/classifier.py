"""A classifier of the length, over the mean of the encoder's output.

    p(length) = softmax(E mean(memory))        class = length, or length - source length + classes / 2

Several candidates may be tried side by side. Lee et al. 2018, arXiv:1802.06901; Ghazvininejad et al. 2019,
"Mask-Predict", arXiv:1904.09324.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bases.lengths import check_classifier
from regard.core import Canvases, Length, Memory, source_lengths
from regard.core.contracts import new_table


class Classifier(Length):
    """classes: the number of lengths, or of differences, that it can tell apart.
    offset:     it predicts the difference to the source's length, which few data teach sooner.
    weight:     factor of its loss.
    detach:     its loss does not change the encoder.
    """

    examples = ({"classes": 24}, {"classes": 24, "offset": False, "detach": True})

    def __init__(self, width: int, classes: int = 256, offset: bool = True, weight: float = 0.1, detach: bool = False):
        super().__init__()
        check_classifier(classes, weight)
        self.classes, self.offset, self.weight, self.detach = classes, offset, weight, detach
        self.table = new_table(classes, width)

    def logits(self, memory: Memory) -> Tensor:
        """Return logits (batch, classes)."""
        x = memory.x.detach() if self.detach else memory.x
        if memory.valid is None:
            return F.linear(x.mean(1), self.table)
        real = memory.valid[..., None].to(x.dtype)
        return F.linear((x * real).sum(1) / real.sum(1), self.table)

    def first(self, sources: Tensor) -> Tensor:
        """Return the length (batch,) that class 0 stands for. sources: lengths of the sources."""
        return sources - self.classes // 2 if self.offset else torch.zeros_like(sources)

    def fits(self, sources: Tensor, needed: Tensor) -> Tensor:
        at = needed - self.first(sources)
        return (at >= 0) & (at < self.classes)

    def remedy(self, sources: Tensor, needed: Tensor) -> str:
        classes = 2 * (needed - sources).abs() + 2 if self.offset else needed + 1
        return f"model.length.classes={int(classes.max())}"

    def candidates(self, memory: Memory, count: int) -> Canvases:
        lengths = self.first(source_lengths(memory))[:, None] + torch.arange(self.classes, device=memory.x.device)
        logs = self.logits(memory).log_softmax(-1).masked_fill(lengths < 1, -torch.inf)
        if count == 1:  # max takes the first of equals, as the stable sort does, which ONNX lacks
            best, at = logs.max(-1, keepdim=True)
        else:
            best, at = torch.sort(logs, dim=-1, descending=True, stable=True)
        return Canvases(lengths.gather(1, at[:, :count]).clamp(min=1), best[:, :count])

    def loss(self, memory: Memory, lengths: Tensor, copies: Tensor | None) -> Tensor:
        at = (lengths - self.first(source_lengths(memory))).clamp(0, self.classes - 1)
        return self.weight * F.cross_entropy(self.logits(memory), at, reduction="none")
