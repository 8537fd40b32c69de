"""Comparison of two texts that follow each other in a row: each is summed to one vector, and the head reads features of
the two. The sum of their products is `width` times the cosine.

    u, v   = the sums over the first and over the second text, scaled to length sqrt(width)
    logits = W [u * v, |u - v|, u, v] + b

Features: Conneau et al. 2017, "Supervised Learning of Universal Sentence Representations from Natural Language
Inference Data", arXiv:1705.02364. Sums of word vectors: Wieting et al. 2016, "Towards Universal Paraphrastic Sentence
Embeddings", arXiv:1511.08198.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.core import Context, Dropout, Head, UserError

MIN_NORM = 1e-4  # shorter sums are not scaled up to the full length


class Compare(Head):
    """classes: number of classes; None: one number (regression).
    dropout:    dropout before the last linear layer.

    `context.segments` holds the text of each position: 0 for the first, anything else for the second. Without segments
    all positions are of the first text, and the second is empty.
    """

    examples = ({"classes": 3}, {})
    pools = True

    def __init__(self, width: int, classes: int | None = None, dropout: float = 0.0):
        super().__init__()
        if classes is not None and classes < 2:
            raise UserError(f"classes must be at least 2, not {classes}; for one number leave them out")
        self.classes, self.width = classes, width
        self.drop = Dropout(dropout)
        self.out = nn.Linear(4 * width, classes or 1)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Return logits (batch, classes), or a number (batch, 1)."""
        segments = context.segments
        second = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device) if segments is None else segments > 0
        valid = torch.ones_like(second) if context.valid is None else context.valid
        u, v = self._sum(x, valid & ~second), self._sum(x, valid & second)
        return self.out(self.drop(torch.cat((u * v, (u - v).abs(), u, v), -1)))

    def _sum(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return the scaled sum of x (batch, time, width) over the chosen positions (batch, time): (batch, width)."""
        total = x.masked_fill(~chosen[..., None], 0.0).sum(1)
        return math.sqrt(self.width) * F.normalize(total, dim=-1, eps=MIN_NORM)

    def flops(self, length: int) -> int:
        return 2 * self.out.weight.numel()
